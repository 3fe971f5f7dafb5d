#ifndef MOERL_LIBS_FABRIC_MUTATION_H_
#define MOERL_LIBS_FABRIC_MUTATION_H_

// Deliberate mistakes, one at a time, that the chaos tests must catch: a check that cannot fail proves nothing.
// Compiled in with failpoints only; elsewhere IsMutated is the constant false.
namespace moerl::fabric {

enum class Mutation {
  kNone,
  kTrustHeader,     // a slot is read before its immediate came
  kStageReuse,      // one staging place for all slots of a stream, rewritten before its local completion
  kArrivalOrder,    // parts of a stream are taken as they arrive
  kRunningCredit,   // a credit is a running total, not the slot it frees
  kNoBufferInSlot,  // the immediate does not tell buffers apart
  kOnePool,         // forwarding inside the node needs a credit of the hop between nodes
  kNoReady,         // rows enter a ring before its reader posted the operation
  kNoSequence,      // rows belong to the oldest operation, whatever their header says
  kOwnRowsOnly,     // a dispatch ends on a proxy when its own rows are in
  kSumAsArrived,    // partials are added in the order of arrival
  kRankDedup,       // a token crosses once per rank, not once per node
  kNoFlush,         // partly filled parts wait until they are full
  // Of the membership.
  kHalfWithoutLowest,   // an exact half goes on, whoever is in it
  kViewIsMembership,    // what one member sees becomes the membership without a vote
  kHasty,               // whoever has not promised yet is left out
  kSilenceAccuses,      // whoever has not promised soon is taken for lost
  kForgetAccepted,      // a promise does not tell what was accepted before
  kAccusationsStay,     // accusations outlive their epoch
  kDeadDoNotCount,      // a majority of the living is enough
  kFinishedOfProposer,  // the last finished operation is the proposer's, not everybody's
};

#ifdef MOERL_FAILPOINTS
inline Mutation active_mutation = Mutation::kNone;  // set between runs, by one thread
inline bool IsMutated(Mutation mutation) { return __builtin_expect(active_mutation == mutation, 0); }
#else
constexpr bool IsMutated(Mutation) { return false; }
#endif

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_MUTATION_H_
