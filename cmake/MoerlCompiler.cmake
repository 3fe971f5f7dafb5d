# Language level, warnings and the floating-point rules that bitwise equality rests on.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

find_program(MOERL_CCACHE ccache)
if(MOERL_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${MOERL_CCACHE})
endif()
find_program(MOERL_MOLD mold)
if(MOERL_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

# One rounding per written operation: no contraction, no reassociation (docs/architecture.md: the row rule).
add_compile_options(-ffp-contract=off -fno-fast-math)

if(MOERL_SANITIZE)
  add_compile_options(-fsanitize=${MOERL_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${MOERL_SANITIZE})
endif()
if(MOERL_FAILPOINTS)
  add_compile_definitions(MOERL_FAILPOINTS=1)
endif()

# Warnings are errors for code written here; generated code is exempt.
set(MOERL_WARNINGS -Wall -Wextra -Werror)
