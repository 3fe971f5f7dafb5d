#ifndef MOERL_LIBS_EXPERIENCE_MUTANT_H_
#define MOERL_LIBS_EXPERIENCE_MUTANT_H_

// MOERL_MUTANT(name) is false in every program. The protocol's simulation test compiles the state machines
// with MOERL_PROTOCOL_MUTANTS defined; there it is true for the rule that the test breaks on purpose, to
// show that the invariants notice.

#ifdef MOERL_PROTOCOL_MUTANTS
#include <string_view>
namespace moerl::protocol_test {
inline std::string_view mutant;
}
#define MOERL_MUTANT(name) (::moerl::protocol_test::mutant == #name)
#else
#define MOERL_MUTANT(name) false
#endif

#endif  // MOERL_LIBS_EXPERIENCE_MUTANT_H_
