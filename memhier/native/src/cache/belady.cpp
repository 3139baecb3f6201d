// Belady's rule for Python: one call a batch, the GIL let go while it works.
#include "cache/belady.hpp"

#include <memory>
#include <mutex>
#include <variant>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "bind/array.hpp"
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
  std::size_t announce(const Array<const std::int64_t, 1>& keys) {
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    window_.append(keys.data(), keys.size());
    const std::size_t distinct = window_.last_announced();
    if (distinct <= capacity_) return 0;
    window_.take_back();
    return distinct;
  }

  nb::bytes awaited(std::size_t after) {
    std::vector<std::int64_t> keys;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      keys = window_.awaited(after);
    }
    return as_bytes(keys);
  }

  // Takes all announced batches back, the last one first.
  void withdraw() {
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    while (window_.pending() > 0) window_.take_back();
  }

  // The victims as bytes, or the capacity that would be enough, nothing changed.
  std::variant<nb::bytes, std::size_t> access(const Array<const std::int64_t, 1>& keys,
                                              const Array<const std::int64_t, 1>& pinned, const Array<bool, 1>& hit) {
    require(hit.size() == keys.size(), "hit: one byte per key");
    std::vector<std::int64_t> evicted;
    std::size_t needed = 0;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      const std::int64_t* key = keys.data();
      const std::size_t count = keys.size();
      const bool unannounced = window_.pending() == 0;
      // As planned ahead, which spares looking the keys up.
      bool in_order = !unannounced && window_.is_next_in_order(key, count);
      if (unannounced) {
        window_.append(key, count);
        in_order = window_.last_announced() == count;  // each key once
      } else if (!in_order && !window_.is_next(key, count))
        throw nb::value_error("keys differ from the batch that was announced for this turn");
      needed = window_.hold(pinned.data(), pinned.size());
      if (needed <= capacity_) {
        if (in_order)
          window_.step(hit.data());
        else
          window_.access_as_given(key, count, hit.data());
        evicted = window_.take_evicted();
      } else if (unannounced) {
        window_.take_back();
      }
    }
    if (needed > capacity_) return needed;
    return as_bytes(evicted);
  }

  // The keys of the window's first batch, whether each was a hit, and the victims.
  std::tuple<nb::bytes, nb::bytes, nb::bytes> advance() {
    std::vector<std::int64_t> keys, evicted;
    std::unique_ptr<bool[]> hits;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      if (window_.pending() == 0) throw nb::value_error("no batch is announced");
      keys = window_.next_keys();
      hits = std::make_unique<bool[]>(keys.size());
      window_.hold(nullptr, 0);
      window_.step(hits.get());
      evicted = window_.take_evicted();
    }
    return {as_bytes(keys), nb::bytes(hits.get(), keys.size()), as_bytes(evicted)};
  }

  void replay(const Array<const std::int64_t, 1>& keys, std::size_t lookahead, const Array<bool, 1>& hit) {
    require(hit.size() == keys.size(), "hit: one byte per key");
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    const std::int64_t* key = keys.data();
    const std::size_t count = keys.size();
    std::size_t announced = 0;
    for (std::size_t i = 0; i < count; ++i) {
      for (; announced < count && announced <= i + lookahead; ++announced) {
        if (announced + BeladyWindow::kAhead < count) window_.prefetch(key[announced + BeladyWindow::kAhead]);
        window_.append(key + announced, 1);
      }
      window_.hold(nullptr, 0);
      window_.step(hit.data() + i);
      window_.forget_evicted();
    }
  }

  nb::bytes expire() {
    std::vector<std::int64_t> evicted;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      window_.expire();
      evicted = window_.take_evicted();
    }
    return as_bytes(evicted);
  }

  void discard(const Array<const std::int64_t, 1>& keys) {
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < keys.size(); ++i) window_.discard(keys[i]);
  }

 private:
  static nb::bytes as_bytes(const std::vector<std::int64_t>& items) {
    return nb::bytes(items.data(), items.size() * sizeof(std::int64_t));
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
      .def(nb::init<std::size_t, std::uint64_t>(), nb::kw_only(), nb::arg("capacity"), nb::arg("half_life"))
      .def("announce", &Belady::announce, nb::arg("keys"))
      .def("awaited", &Belady::awaited, nb::kw_only(), nb::arg("after"))
      .def("withdraw", &Belady::withdraw)
      .def("access", &Belady::access, nb::kw_only(), nb::arg("keys"), nb::arg("pinned"), nb::arg("hit"))
      .def("advance", &Belady::advance)
      .def("expire", &Belady::expire)
      .def("replay", &Belady::replay, nb::kw_only(), nb::arg("keys"), nb::arg("lookahead"), nb::arg("hit"))
      .def("discard", &Belady::discard, nb::arg("keys"))
      .def("__len__", &Belady::size)
      .def("__contains__", &Belady::contains, nb::arg("key"))
      .def_prop_ro("pending", &Belady::pending)
      .def_prop_ro("idle", &Belady::idle)
      .def_prop_ro("memory_bytes", &Belady::bytes);
}
