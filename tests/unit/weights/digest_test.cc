#include "libs/weights/digest.h"

#include <gtest/gtest.h>

namespace moerl::weights {
namespace {

TEST(Digest, IsSha256) {  // FIPS 180-2, appendix B
  EXPECT_EQ(Sha256("abc").ToHex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256("").ToHex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(Digest, ReadsBackWhatItWrites) {
  const Digest digest = Sha256("abc");
  EXPECT_EQ(Digest::FromHex(digest.ToHex()), digest);
  EXPECT_EQ(Digest::FromBytes(digest.view()), digest);
}

TEST(Digest, RefusesWhatIsNoDigest) {
  EXPECT_FALSE(Digest::FromHex("ba78"));
  EXPECT_FALSE(Digest::FromHex(std::string(64, 'G')));
  EXPECT_FALSE(Digest::FromHex(std::string(64, 'A')));  // one spelling, or file names would alias
  EXPECT_FALSE(Digest::FromBytes(std::string(31, 'x')));
}

TEST(Hasher, TellsPiecesApart) {
  EXPECT_EQ(Hasher().Add("a").Add("bc").Finish(), Sha256("abc"));
  EXPECT_NE(Hasher().AddText("a").AddText("bc").Finish(), Hasher().AddText("ab").AddText("c").Finish());
  Hasher hasher;
  hasher.Add("x").Finish();
  EXPECT_EQ(hasher.Add("abc").Finish(), Sha256("abc"));
}

}  // namespace
}  // namespace moerl::weights
