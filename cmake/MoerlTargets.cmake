# How moerl's targets are declared. A directory is a target with the same name.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Adds every direct subdirectory of `parent` that has a CMakeLists.txt, in name order.
function(moerl_add_subdirectories parent)
  file(GLOB lists CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${parent}/*/CMakeLists.txt)
  foreach(list ${lists})
    get_filename_component(directory ${list} DIRECTORY)
    get_property(done GLOBAL PROPERTY MOERL_SUBDIRECTORIES)
    if(NOT directory IN_LIST done)
      set_property(GLOBAL APPEND PROPERTY MOERL_SUBDIRECTORIES ${directory})
      add_subdirectory(${directory})
    endif()
  endforeach()
endfunction()

# moerl_add_library(base SOURCES a.cc HEADERS a.h DEPS absl::status PRIVATE_DEPS spdlog::spdlog)
# Declares moerl_base, alias moerl::base. HEADERS are the public ones and are installed;
# includes are relative to the repository root ("libs/base/log.h").
function(moerl_add_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;HEADERS;DEPS;PRIVATE_DEPS" ${ARGN})
  if(ARG_SOURCES)
    add_library(moerl_${name} STATIC ${ARG_SOURCES})
    set(scope PUBLIC)
    target_compile_options(moerl_${name} PRIVATE ${MOERL_WARNINGS})
    foreach(dep ${ARG_PRIVATE_DEPS})
      target_link_libraries(moerl_${name} PRIVATE ${dep})
    endforeach()
  else()
    add_library(moerl_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(moerl::${name} ALIAS moerl_${name})
  set_target_properties(moerl_${name} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(moerl_${name} ${scope}
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/moerl>)
  target_link_libraries(moerl_${name} ${scope} ${ARG_DEPS})
  file(RELATIVE_PATH here ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  install(TARGETS moerl_${name} EXPORT moerlTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  if(ARG_HEADERS)
    install(FILES ${ARG_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moerl/${here})
  endif()
endfunction()

# What a program, a test and a fuzz target have in common.
function(moerl_add_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_compile_options(${name} PRIVATE ${MOERL_WARNINGS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  if(MOERL_SANITIZE)
    target_link_libraries(${name} PRIVATE moerl_sanitizer_runtime)
  endif()
endfunction()

# moerl_add_program(moerl-trainer SOURCES main.cc DEPS moerl::rpc)
function(moerl_add_program name)
  moerl_add_executable(${name} ${ARGN})
  install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endfunction()

# moerl_register_test(run_test COMMAND python3 … [LABEL unit|integration|long] [TIMEOUT_S 300] [SERIAL])
# One ctest entry; every test comes through here. Exit code 77 means skipped. LABEL defaults to integration. Times are
# those of a release build on two cores: a sanitizer build has MOERL_TEST_TIME_SCALE times as long, and what a test itself
# bounds it multiplies by the environment variable of that name (tests/time_scale.h).
function(moerl_register_test name)
  cmake_parse_arguments(ARG "SERIAL" "LABEL;TIMEOUT_S" "COMMAND" ${ARGN})
  if(NOT ARG_LABEL)
    set(ARG_LABEL integration)
  endif()
  if(NOT ARG_TIMEOUT_S)
    set(ARG_TIMEOUT_S 300)
  endif()
  set(scale 1)
  if(MOERL_SANITIZE)
    set(scale 5)
  endif()
  math(EXPR timeout_s "${ARG_TIMEOUT_S} * ${scale}")
  add_test(NAME ${name} COMMAND ${ARG_COMMAND} WORKING_DIRECTORY ${CMAKE_BINARY_DIR})
  set_tests_properties(${name} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${timeout_s} SKIP_RETURN_CODE 77
    ENVIRONMENT "MOERL_TEST_TIME_SCALE=${scale};MOERL_SOURCE_DIR=${PROJECT_SOURCE_DIR};MOERL_BINARY_DIR=${CMAKE_BINARY_DIR}")
  if(ARG_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()

# moerl_add_test(ledger_test SOURCES ledger_test.cc DEPS moerl::base [LABEL integration|long])
# One ctest entry a program. LABEL defaults to unit; `scripts/test` runs unit and integration,
# `scripts/test --all` also long.
function(moerl_add_test name)
  cmake_parse_arguments(ARG "" "LABEL;TIMEOUT_S" "SOURCES;DEPS;ARGS" ${ARGN})
  if(NOT MOERL_BUILD_TESTS)
    return()
  endif()
  foreach(dep ${ARG_DEPS})
    if(NOT MOERL_WITH_GRPC AND dep MATCHES "^moerl::" AND NOT TARGET ${dep})
      return()  # a test of a library that is not built without gRPC
    endif()
  endforeach()
  if(NOT ARG_LABEL)
    set(ARG_LABEL unit)
  endif()
  moerl_add_executable(${name} SOURCES ${ARG_SOURCES} DEPS ${ARG_DEPS} GTest::gmock GTest::gtest GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_compile_definitions(${name} PRIVATE MOERL_SOURCE_DIR="${PROJECT_SOURCE_DIR}" MOERL_BINARY_DIR="${CMAKE_BINARY_DIR}")
  moerl_register_test(${name} COMMAND ${name} ${ARG_ARGS} LABEL ${ARG_LABEL} TIMEOUT_S ${ARG_TIMEOUT_S})
endfunction()

# Exports the libraries so that another project can find_package(moerl) and link moerl::ep alone.
function(moerl_install_package)
  install(EXPORT moerlTargets NAMESPACE moerl:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moerl)
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/moerlConfig.cmake.in
    ${CMAKE_BINARY_DIR}/moerlConfig.cmake INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moerl)
  write_basic_package_version_file(${CMAKE_BINARY_DIR}/moerlConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_BINARY_DIR}/moerlConfig.cmake ${CMAKE_BINARY_DIR}/moerlConfigVersion.cmake
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moerl)
endfunction()

# moerl_add_python_test(drain_test SCRIPT drain_test.py [LABEL integration|long] [TIMEOUT_S 300] [ARGS …])
# Runs in build/venv (scripts/python-env) with MOERL_SOURCE_DIR and MOERL_BINARY_DIR in the environment.
function(moerl_add_python_test name)
  cmake_parse_arguments(ARG "" "SCRIPT;LABEL;TIMEOUT_S" "ARGS" ${ARGN})
  if(NOT MOERL_BUILD_TESTS)
    return()
  endif()
  moerl_register_test(${name} LABEL ${ARG_LABEL} TIMEOUT_S ${ARG_TIMEOUT_S}
    COMMAND ${PROJECT_SOURCE_DIR}/build/venv/bin/python ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_SCRIPT} ${ARG_ARGS})
endfunction()
