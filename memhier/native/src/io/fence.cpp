// The one thing numpy cannot do for the generations of memhier.cache.slab: order memory between processors.
#include <atomic>

#include "bind/module.hpp"

void register_fence(nanobind::module_& m) {
  m.def("fence", [] { std::atomic_thread_fence(std::memory_order_seq_cst); });
}
