#include "libs/fabric/wire_stream.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/fabric/mutation.h"

namespace moerl::fabric {
namespace {

// The header sits 16 bytes into the slot, so that the payload is aligned to 64.
constexpr size_t kPad = 16;
constexpr size_t kCreditBytes = 8;

size_t StrideOf(size_t payload_bytes_max) { return (kPad + sizeof(WireHeader) + payload_bytes_max + 63) / 64 * 64; }

uint64_t DigestOf(const std::byte* payload, size_t bytes) { return XXH3_64bits(payload, bytes); }

}  // namespace

// ---------------------------------------------------------------- sender

std::byte* WireSender::Stage(uint64_t position) const {
  const uint64_t slot = IsMutated(Mutation::kStageReuse) ? 0 : position % slots_.size();
  return stage_ + slot * stride_;
}

absl::Span<std::byte> WireSender::Reserve() {
  const Slot& slot = slots_[published_ % slots_.size()];
  if (IsMutated(Mutation::kRunningCredit)) {
    if (published_ - credits_ >= slots_.size()) return {};
  } else if (!slot.has_credit || slot.is_unsent) {
    if (!stalled_since_) stalled_since_ = absl::Now();
    return {};
  }
  if (stalled_since_) {
    stalled_ += absl::Now() - *stalled_since_;
    stalled_since_.reset();
  }
  return {Stage(published_) + kPad + sizeof(WireHeader), payload_max_};
}

void WireSender::Publish(uint64_t sequence, uint8_t flags, uint16_t count, size_t bytes) {
  MOERL_CHECK(bytes <= payload_max_);
  Slot& slot = slots_[published_ % slots_.size()];
  std::byte* stage = Stage(published_) + kPad;
  WireHeader header = {};
  header.epoch = hub_->membership().epoch;
  header.sequence = sequence;
  header.source = static_cast<uint16_t>(hub_->self());
  header.buffer = buffer_;
  header.kind = kind_;
  header.flags = flags;
  header.count = count;
  header.part = static_cast<uint32_t>(published_);
  header.bytes = static_cast<uint32_t>(bytes);
  header.digest = DigestOf(stage + sizeof(WireHeader), bytes);
  std::memcpy(stage, &header, sizeof(header));
  slot.has_credit = false;
  slot.is_unsent = true;
  ++num_unsent_;
  ++published_;
  Move();
}

bool WireSender::Move() {
  bool moved = false;
  while (posted_ < published_) {
    const uint32_t slot = static_cast<uint32_t>(posted_ % slots_.size());
    const std::byte* stage = Stage(posted_) + kPad;
    WireHeader header;
    std::memcpy(&header, stage, sizeof(header));
    WriteRequest request;
    request.peer = peer_;
    request.region = region_;
    request.source = stage;
    request.to = remote_;
    request.to_offset = remote_offset_ + slot * stride_ + kPad;
    request.bytes = sizeof(WireHeader) + header.bytes;
    request.immediate = hub_->ImmediateOf(remote_slot_ + slot);
    request.context = Hub::ContextOf(sender_id_, slot);
    if (!hub_->transport().Write(request)) return moved;
    bytes_posted_ += request.bytes;
    ++posted_;
    moved = true;
  }
  return moved;
}

bool WireSender::has_all_credits() const {
  if (IsMutated(Mutation::kRunningCredit)) return credits_ == published_;
  return std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.has_credit; });
}

void WireSender::OnArrived(uint32_t index) {
  if (IsMutated(Mutation::kRunningCredit)) {
    uint64_t total;
    std::memcpy(&total, credit_ + index * 0, sizeof(total));
    credits_ = total;
    return;
  }
  if (slots_[index].has_credit) {
    hub_->Fail(absl::InternalError(absl::StrCat("fabric: ", hub_->name_of(peer_), " gave back slot ", index,
                                                " of stream kind ", kind_, " twice")));
    return;
  }
  slots_[index].has_credit = true;
  ++credits_;
}

void WireSender::OnSent(uint32_t index) {
  slots_[index].is_unsent = false;
  --num_unsent_;
}

// ---------------------------------------------------------------- receiver

void WireReceiver::OnArrived(uint32_t index) {
  if (slots_[index].has_arrived) {
    hub_->Fail(absl::DataLossError(absl::StrCat("fabric: ", hub_->name_of(peer_), " wrote slot ", index,
                                                " of stream kind ", kind_, " without a credit")));
    return;
  }
  slots_[index].has_arrived = true;
  if (IsMutated(Mutation::kArrivalOrder)) arrivals_.push_back(index);
}

void WireReceiver::OnSent(uint32_t index) {
  slots_[index].is_unsent = false;
  --num_unsent_;
}

WireReceiver::Message WireReceiver::Front() {
  uint32_t index = static_cast<uint32_t>(position_ % slots_.size());
  if (IsMutated(Mutation::kArrivalOrder)) {
    if (arrivals_.empty()) return {};
    index = arrivals_.front();
  }
  Slot& slot = slots_[index];
  const std::byte* at = At(index) + kPad;
  const WireHeader* header = reinterpret_cast<const WireHeader*>(at);
  const bool is_there =
      slot.has_arrived || (IsMutated(Mutation::kTrustHeader) && header->part == static_cast<uint32_t>(position_) &&
                           header->epoch == hub_->membership().epoch);
  if (!is_there) return {};
  if (!slot.is_checked) {
    if (!Check(*header, at + sizeof(WireHeader))) return {};
    slot.is_checked = true;
  }
  return {header, {at + sizeof(WireHeader), header->bytes}};
}

bool WireReceiver::Check(const WireHeader& header, const std::byte* payload) {
  const bool is_ours = header.epoch == hub_->membership().epoch && header.source == peer_ && header.buffer == buffer_ &&
                       header.kind == kind_ && header.bytes <= payload_max_ &&
                       (header.part == static_cast<uint32_t>(position_) || IsMutated(Mutation::kArrivalOrder));
  if (is_ours && header.digest == DigestOf(payload, header.bytes)) return true;
  hub_->Fail(absl::DataLossError(absl::StrCat(
      "fabric: message ", position_, " from ", hub_->name_of(peer_), " (buffer ", buffer_, ", kind ", kind_,
      is_ours ? ") does not match its digest" : ") has a header of another message", "; found epoch ", header.epoch,
      ", source ", header.source, ", buffer ", header.buffer, ", kind ", header.kind, ", part ", header.part)));
  return false;
}

void WireReceiver::Pop() {
  uint32_t index = static_cast<uint32_t>(position_ % slots_.size());
  if (IsMutated(Mutation::kArrivalOrder)) {
    index = arrivals_.front();
    arrivals_.erase(arrivals_.begin());
  }
  slots_[index].has_arrived = false;
  slots_[index].is_checked = false;
  owed_.push_back(index);
  ++position_;
}

bool WireReceiver::Move() {
  size_t kept = 0;
  const size_t num_owed = owed_.size();
  for (size_t i = 0; i < num_owed; ++i) {
    const uint32_t index = owed_[i];
    Slot& slot = slots_[index];
    const uint64_t total = position_;
    WriteRequest request;
    request.peer = peer_;
    request.region = region_;
    request.source = credit_source_ + index * kCreditBytes;
    request.to = remote_;
    request.to_offset = remote_offset_ + (IsMutated(Mutation::kRunningCredit) ? 0 : index * kCreditBytes);
    request.bytes = kCreditBytes;
    request.immediate = hub_->ImmediateOf(remote_slot_ + index);
    request.context = Hub::ContextOf(sender_id_, index);
    if (!slot.is_unsent) std::memcpy(credit_source_ + index * kCreditBytes, &total, kCreditBytes);
    if (slot.is_unsent || !hub_->transport().Write(request)) {
      owed_[kept++] = index;
      continue;
    }
    slot.is_unsent = true;
    ++num_unsent_;
  }
  owed_.resize(kept);
  return kept < num_owed;
}

// ---------------------------------------------------------------- all streams of a buffer

struct WireStreams::OfferEntry {
  int32_t peer;
  uint8_t kind;
  uint8_t is_sender;
  uint16_t reserved;
  uint32_t num_slots;
  uint32_t first_slot;
  uint64_t offset;
  uint64_t stride;
};

WireStreams::~WireStreams() { MOERL_CHECK(senders_.empty() && receivers_.empty()); }

void WireStreams::Close() {
  for (auto& sender : senders_) {
    hub_->RemoveSlots(sender->first_credit_slot_, static_cast<uint32_t>(sender->slots_.size()));
    hub_->RemoveSender(sender->sender_id_);
  }
  for (auto& receiver : receivers_) {
    hub_->RemoveSlots(receiver->first_slot_, static_cast<uint32_t>(receiver->slots_.size()));
    hub_->RemoveSender(receiver->sender_id_);
  }
  senders_.clear();
  receivers_.clear();
  if (memory_ != nullptr) hub_->Keep(std::move(memory_));
}

absl::Status WireStreams::Open(absl::Span<const Spec> specs) {
  size_t bytes = 0;
  for (const Spec& spec : specs)
    bytes += spec.num_slots * StrideOf(spec.payload_bytes_max) + 64 + spec.num_slots * kCreditBytes;
  if (specs.empty()) return absl::OkStatus();
  bytes = (bytes + 127) / 64 * 64;
  memory_ = std::shared_ptr<std::byte[]>(new (std::align_val_t{64}) std::byte[bytes](),
                                         [](std::byte* p) { ::operator delete[](p, std::align_val_t{64}); });
  absl::StatusOr<Region> region = hub_->transport().Register(memory_.get(), bytes);
  if (!region.ok()) return region.status();
  region_ = *region;
  std::byte* next = memory_.get();
  for (const Spec& spec : specs) {
    const size_t stride = StrideOf(spec.payload_bytes_max);
    std::byte* slots = next;
    next += spec.num_slots * stride;
    std::byte* credits = next;
    next += (spec.num_slots * kCreditBytes + 63) / 64 * 64;
    if (spec.is_sender) {
      auto sender = std::make_unique<WireSender>();
      sender->hub_ = hub_;
      sender->peer_ = spec.peer;
      sender->buffer_ = buffer_;
      sender->kind_ = spec.kind;
      sender->stride_ = stride;
      sender->payload_max_ = spec.payload_bytes_max;
      sender->region_ = region_.id;
      sender->stage_ = slots;
      sender->credit_ = credits;
      sender->slots_.resize(spec.num_slots);
      absl::StatusOr<uint32_t> first = hub_->AddSlots(sender.get(), spec.num_slots);
      if (!first.ok()) return first.status();
      sender->first_credit_slot_ = *first;
      sender->sender_id_ = hub_->AddSender(sender.get());
      send_bytes_ += spec.num_slots * stride;
      senders_.push_back(std::move(sender));
    } else {
      auto receiver = std::make_unique<WireReceiver>();
      receiver->hub_ = hub_;
      receiver->peer_ = spec.peer;
      receiver->buffer_ = buffer_;
      receiver->kind_ = spec.kind;
      receiver->stride_ = stride;
      receiver->payload_max_ = spec.payload_bytes_max;
      receiver->region_ = region_.id;
      receiver->slots_memory_ = slots;
      receiver->credit_source_ = credits;
      receiver->slots_.resize(spec.num_slots);
      absl::StatusOr<uint32_t> first = hub_->AddSlots(receiver.get(), spec.num_slots);
      if (!first.ok()) return first.status();
      receiver->first_slot_ = *first;
      receiver->sender_id_ = hub_->AddSender(receiver.get());
      receive_bytes_ += spec.num_slots * stride;
      receivers_.push_back(std::move(receiver));
    }
  }
  return absl::OkStatus();
}

std::string WireStreams::Offer() const {
  std::string offer(reinterpret_cast<const char*>(&region_.remote), sizeof(RemoteRegion));
  // Numbers that start anew with every buffer do not tell buffers apart.
  uint32_t base = UINT32_MAX;
  for (const auto& s : senders_) base = std::min(base, s->first_credit_slot_);
  for (const auto& r : receivers_) base = std::min(base, r->first_slot_);
  if (!IsMutated(Mutation::kNoBufferInSlot)) base = 0;
  const auto add = [&](const OfferEntry& entry) { offer.append(reinterpret_cast<const char*>(&entry), sizeof(entry)); };
  for (const auto& s : senders_) {
    add({s->peer_, s->kind_, 1, 0, static_cast<uint32_t>(s->slots_.size()), s->first_credit_slot_ - base,
         static_cast<uint64_t>(s->credit_ - memory_.get()), s->stride_});
  }
  for (const auto& r : receivers_) {
    add({r->peer_, r->kind_, 0, 0, static_cast<uint32_t>(r->slots_.size()), r->first_slot_ - base,
         static_cast<uint64_t>(r->slots_memory_ - memory_.get()), r->stride_});
  }
  return offer;
}

absl::Status WireStreams::Connect(absl::Span<const std::string> offers) {
  MOERL_CHECK(static_cast<int>(offers.size()) == hub_->membership().size());
  // Finds the entry of `peer` that is the other end of a stream of ours.
  const auto find = [&](int peer, uint8_t kind, bool is_sender, size_t num_slots, size_t stride, RemoteRegion* region,
                        uint64_t* offset, uint32_t* slot) -> absl::Status {
    const std::string& offer = offers[peer];
    for (size_t at = sizeof(RemoteRegion); at + sizeof(OfferEntry) <= offer.size(); at += sizeof(OfferEntry)) {
      OfferEntry entry;
      std::memcpy(&entry, offer.data() + at, sizeof(entry));
      if (entry.peer != hub_->self() || entry.kind != kind || (entry.is_sender != 0) != is_sender) continue;
      if (entry.num_slots != num_slots || entry.stride != stride) break;
      std::memcpy(region, offer.data(), sizeof(RemoteRegion));
      *offset = entry.offset;
      *slot = entry.first_slot;
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "fabric: ", hub_->name_of(peer), " has no stream of kind ", kind, " with ", num_slots, " slots of ", stride,
        " bytes for ", hub_->name_of(hub_->self()), "; give all ranks the same buffer options"));
  };
  for (auto& s : senders_) {
    const absl::Status status = find(s->peer_, s->kind_, /*is_sender=*/false, s->slots_.size(), s->stride_, &s->remote_,
                                     &s->remote_offset_, &s->remote_slot_);
    if (!status.ok()) return status;
  }
  for (auto& r : receivers_) {
    const absl::Status status = find(r->peer_, r->kind_, /*is_sender=*/true, r->slots_.size(), r->stride_, &r->remote_,
                                     &r->remote_offset_, &r->remote_slot_);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

bool WireStreams::Move() {
  bool moved = false;
  for (auto& sender : senders_) moved |= sender->Move();
  for (auto& receiver : receivers_) moved |= receiver->Move();
  return moved;
}

bool WireStreams::is_idle() const {
  const auto idle = [](const auto& stream) { return stream->is_idle(); };
  return std::all_of(senders_.begin(), senders_.end(), idle) && std::all_of(receivers_.begin(), receivers_.end(), idle);
}

}  // namespace moerl::fabric
