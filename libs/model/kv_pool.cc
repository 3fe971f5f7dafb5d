#include "libs/model/kv_pool.h"

#include <cstring>

#include "libs/base/check.h"

namespace moerl::model {

static_assert(kPagePositions == tensor::kPageTokens);

KvPool::KvPool(const ModelConfig& config, tensor::DType dtype, int64_t num_pages, bool poison, tensor::Backend& backend)
    : backend_(backend),
      dtype_(dtype),
      kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      layer_bytes_(tensor::KvPageBytes(dtype, config.num_kv_heads, config.head_dim)),
      page_bytes_(layer_bytes_ * config.num_layers),
      poison_(poison),
      memory_(backend.NewTensor(tensor::DType::kF32, {num_pages, page_bytes_ / 4})),
      users_(num_pages, 0),
      version_(num_pages) {
  // Low pages first.
  for (int64_t page = num_pages - 1; page >= 0; --page) {
    free_.push_back(static_cast<int32_t>(page));
    if (poison_) Poison(free_.back());
  }
}

void KvPool::Poison(int32_t page) {
  const std::vector<uint8_t> ones(page_bytes_, 0xFF);  // a NaN in fp32 and in bf16
  backend_.CopyFromHost(ones.data(), page_bytes_, Bytes(page).data);
}

tensor::Mat KvPool::Bytes(int32_t page) { return memory_.mat().Rows(page, 1); }

int32_t KvPool::Allocate(Version version) {
  MOERL_CHECK(!free_.empty());
  const int32_t page = free_.back();
  free_.pop_back();
  MOERL_CHECK(users_[page] == 0);
  users_[page] = 1;
  version_[page] = version;
  return page;
}

void KvPool::Release(int32_t page) {
  MOERL_CHECK(users_[page] > 0);
  if (--users_[page] > 0) return;
  if (poison_) Poison(page);
  free_.push_back(page);
}

int32_t KvPool::Copy(int32_t page) {
  const int32_t copy = Allocate(version_[page]);
  backend_.Cast(Bytes(page), Bytes(copy));
  return copy;
}

tensor::KvCache KvPool::layer(int index) const {
  char* base = static_cast<char*>(const_cast<void*>(memory_.raw())) + index * layer_bytes_;
  return {base, page_bytes_, dtype_, kv_heads_, head_dim_};
}

}  // namespace moerl::model
