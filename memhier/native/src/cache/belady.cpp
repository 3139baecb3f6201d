// Belady's rule for Python: one call a batch, the GIL let go while it works.
#include "cache/belady.hpp"

#include <nanobind/nanobind.h>

#include <mutex>

#include "bind/buffer.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

class Belady {
 public:
  Belady(std::size_t capacity, std::uint64_t half_life) : capacity_(capacity), window_(capacity, half_life) {}

  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return window_.resident();
  }

  std::size_t pending() const {
    const std::lock_guard lock(mutex_);
    return window_.pending();
  }

  std::size_t idle() const {
    const std::lock_guard lock(mutex_);
    return window_.idle();
  }

  bool contains(std::int64_t key) const {
    const std::lock_guard lock(mutex_);
    return window_.contains(key);
  }

  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    return sizeof *this - sizeof window_ + window_.bytes();
  }

  // 0, or the capacity that would be enough, nothing changed.
  std::size_t announce(nb::handle keys) {
    const Buffer batch(keys, Buffer::Access::read);
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    window_.append(batch.as<const std::int64_t>(), batch.count<std::int64_t>());
    const std::size_t distinct = window_.last_announced();
    if (distinct <= capacity_) return 0;
    window_.take_back();
    return distinct;
  }

  // Takes all announced batches back, the last one first.
  void withdraw() {
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    while (window_.pending() > 0) window_.take_back();
  }

  // The victims as bytes, or the capacity that would be enough, nothing changed.
  nb::object access(nb::handle keys, nb::handle pinned, nb::handle hit) {
    const Buffer batch(keys, Buffer::Access::read), held(pinned, Buffer::Access::read);
    const Buffer hits(hit, Buffer::Access::write);
    hits.require(hits.bytes() == batch.count<std::int64_t>(), "hit: one byte per key");
    std::vector<std::int64_t> evicted;
    std::size_t needed = 0;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      const auto* key = batch.as<const std::int64_t>();
      const std::size_t count = batch.count<std::int64_t>();
      const bool unannounced = window_.pending() == 0;
      // As planned ahead, which spares looking the keys up.
      const bool in_order = !unannounced && window_.is_next_in_order(key, count);
      if (unannounced) window_.append(key, count);
      else if (!in_order && !window_.is_next(key, count))
        throw nb::value_error("keys differ from the batch that was announced for this turn");
      needed = window_.hold(held.as<const std::int64_t>(), held.count<std::int64_t>());
      if (needed <= capacity_) {
        if (in_order) window_.step(hits.as<std::uint8_t>());
        else window_.access_as_given(key, count, hits.as<std::uint8_t>());
        evicted = window_.take_evicted();
      } else if (unannounced) {
        window_.take_back();
      }
    }
    if (needed > capacity_) return nb::int_(needed);
    return as_bytes(evicted);
  }

  // The keys of the window's first batch, whether each was a hit, and the victims.
  nb::tuple advance() {
    std::vector<std::int64_t> keys, evicted;
    std::vector<std::uint8_t> hits;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      if (window_.pending() == 0) throw nb::value_error("no batch is announced");
      keys = window_.next_keys();
      hits.resize(keys.size());
      window_.hold(nullptr, 0);
      window_.step(hits.data());
      evicted = window_.take_evicted();
    }
    return nb::make_tuple(as_bytes(keys), as_bytes(hits), as_bytes(evicted));
  }

  void replay(nb::handle keys, std::size_t lookahead, nb::handle hit) {
    const Buffer trace(keys, Buffer::Access::read), hits(hit, Buffer::Access::write);
    hits.require(hits.bytes() == trace.count<std::int64_t>(), "hit: one byte per key");
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    const auto* key = trace.as<const std::int64_t>();
    const std::size_t count = trace.count<std::int64_t>();
    std::size_t announced = 0;
    for (std::size_t i = 0; i < count; ++i) {
      for (; announced < count && announced <= i + lookahead; ++announced) {
        if (announced + BeladyWindow::kAhead < count) window_.prefetch(key[announced + BeladyWindow::kAhead]);
        window_.append(key + announced, 1);
      }
      window_.hold(nullptr, 0);
      window_.step(hits.as<std::uint8_t>() + i);
      window_.forget_evicted();
    }
  }

  nb::object expire() {
    std::vector<std::int64_t> evicted;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      window_.expire();
      evicted = window_.take_evicted();
    }
    return as_bytes(evicted);
  }

  void discard(nb::handle keys) {
    const Buffer gone(keys, Buffer::Access::read);
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < gone.count<std::int64_t>(); ++i) window_.discard(gone.as<const std::int64_t>()[i]);
  }

 private:
  template <class T>
  static nb::object as_bytes(const std::vector<T>& items) {
    return nb::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
  }

  const std::size_t capacity_;
  mutable std::mutex mutex_;
  BeladyWindow window_;
};

}  // namespace
}  // namespace memhier

void register_belady(nb::module_& m) {
  using memhier::Belady;
  nb::class_<Belady>(m, "BeladyPolicy")
      .def(nb::init<std::size_t, std::uint64_t>(), nb::arg("capacity"), nb::arg("half_life"))
      .def("announce", &Belady::announce, nb::arg("keys"))
      .def("withdraw", &Belady::withdraw)
      .def("access", &Belady::access, nb::arg("keys"), nb::arg("pinned"), nb::arg("hit"))
      .def("advance", &Belady::advance)
      .def("expire", &Belady::expire)
      .def("replay", &Belady::replay, nb::arg("keys"), nb::arg("lookahead"), nb::arg("hit"))
      .def("discard", &Belady::discard, nb::arg("keys"))
      .def("__len__", &Belady::size)
      .def("__contains__", &Belady::contains, nb::arg("key"))
      .def_prop_ro("pending", &Belady::pending)
      .def_prop_ro("idle", &Belady::idle)
      .def_prop_ro("memory_bytes", &Belady::bytes);
}
