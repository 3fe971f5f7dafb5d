// Manifests must answer any bytes with a version that is what it says, or with an error.
#include <cstdint>
#include <string>

#include "libs/base/check.h"
#include "libs/weights/manifest.h"
#include "libs/weights/staging.h"

namespace weights = moerl::weights;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  (void)weights::ParseManifest(bytes);
  // A shard states no root, so that what is made up gets further.
  const auto joined = weights::JoinShards({.epoch = 1, .number = 2}, {&bytes, 1});
  if (!joined.ok()) return 0;
  const auto parsed = weights::ParseManifest(weights::SerializeManifest(*joined));
  MOERL_CHECK(parsed.ok() && *parsed == *joined);
  MOERL_CHECK(joined->bytes() <= weights::TensorOffsets(*joined).back());
  if (joined->bytes() > (1 << 20)) return 0;
  const auto staging = weights::Staging::Begin(*joined, "", nullptr);
  MOERL_CHECK(staging.ok() && (*staging)->missing_bytes() <= joined->bytes());
  for (const weights::ChunkRef& ref : (*staging)->Missing())
    MOERL_CHECK(!(*staging)->Put(ref, "x").ok() || ref.bytes == 1);
  return 0;
}
