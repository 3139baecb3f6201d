// The order of memory between processors, which numpy cannot give to the generations of memhier.cache.slab.
#pragma once

#include <atomic>

namespace memhier {

inline void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace memhier
