// What an op asks of a device once, at its first launch there, and keeps.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

namespace research_engine::cuda {

// `Facts(ordinal)`, made at the first call for a device, which has to be the current one; threads may call it at the same time.
template <typename Facts> const Facts& device_of(const char* op, int ordinal) {
  constexpr int kMostDevices = 64;
  static std::atomic<const Facts*> known[kMostDevices];
  if (ordinal >= kMostDevices) {
    throw std::invalid_argument(std::string(op) + ": device " + std::to_string(ordinal) + "; at most 64 are known");
  }
  const Facts* found = known[ordinal].load(std::memory_order_acquire);
  if (found == nullptr) {
    const Facts* made = new Facts(ordinal);  // kept; a thread that comes second drops its own
    if (known[ordinal].compare_exchange_strong(found, made)) found = made;
    else delete made;
  }
  return *found;
}

}  // namespace research_engine::cuda
