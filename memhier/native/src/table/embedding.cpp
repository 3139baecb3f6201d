// A training step on rows of float32 that lie in slots of a slab: the distinct rows, their sums, and the
// optimizers' updates, in the order and with the roundings of the sparse operators of PyTorch. Products and sums are
// contracted only where std::fma says so (this file is compiled with -ffp-contract=off), and square roots are left to
// PyTorch, whose own are not the nearest float everywhere.
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

struct Occurrence {
  std::int64_t id;
  std::int64_t at;
};

// Equal ids keep their order. Digits of 11 bits, as many as the largest id has.
void sort_stably(std::vector<Occurrence>& items, std::vector<Occurrence>& spare) {
  std::int64_t largest = 0;
  for (const Occurrence& item : items) largest = std::max(largest, item.id);
  spare.resize(items.size());
  for (int shift = 0; shift < 63 && (largest >> shift) != 0; shift += 11) {
    std::array<std::size_t, 2049> ends{};
    for (const Occurrence& item : items) ++ends[((item.id >> shift) & 2047) + 1];
    for (std::size_t digit = 1; digit < 2048; ++digit) ends[digit] += ends[digit - 1];
    for (const Occurrence& item : items) spare[ends[(item.id >> shift) & 2047]++] = item;
    items.swap(spare);
  }
}

// Equal ids come in the order in which std::sort leaves them: that is the order in which PyTorch adds up gradients.
void sort_like_torch(std::vector<Occurrence>& items) {
  std::sort(items.begin(), items.end(), [](const Occurrence& a, const Occurrence& b) { return a.id < b.id; });
}

// Of each table's ids, one table after the other: the distinct ones, rising, plus the table's base (keys); where those
// of each table begin (starts); which of the keys each id is (inverse); the ids' places in sorted order (order, which
// may be empty).
std::size_t distinct(const Array<const std::int64_t, 1>& ids, const Array<const std::int64_t, 1>& ends,
                     const Array<const std::int64_t, 1>& bases, bool like_torch, const Array<std::int64_t, 1>& keys,
                     const Array<std::int64_t, 1>& starts, const Array<std::int32_t, 1>& inverse,
                     const Array<std::int32_t, 1>& order) {
  const std::size_t count = ids.size(), groups = ends.size();
  require(keys.size() == count && inverse.size() == count && (order.size() == 0 || order.size() == count) &&
              count < (std::size_t{1} << 31),
          "keys, inverse, order: as long as ids, which are below 2^31");
  require(starts.size() == groups + 1 && bases.size() >= groups, "starts, bases");
  nb::gil_scoped_release released;
  std::vector<Occurrence> items, spare;
  std::size_t found = 0, from = 0;
  for (std::size_t table = 0; table < groups; ++table) {
    const auto to = static_cast<std::size_t>(ends[table]);
    if (to < from || to > count) throw std::out_of_range("ends: rising, up to the number of ids");
    items.clear();
    for (std::size_t at = from; at < to; ++at) items.push_back({ids[at], static_cast<std::int64_t>(at)});
    if (like_torch)
      sort_like_torch(items);
    else
      sort_stably(items, spare);
    starts[table] = static_cast<std::int64_t>(found);
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i == 0 || items[i].id != items[i - 1].id) keys[found++] = items[i].id + bases[table];
      inverse[static_cast<std::size_t>(items[i].at)] = static_cast<std::int32_t>(found - 1);
      if (order.size() != 0) order[from + i] = static_cast<std::int32_t>(items[i].at);
    }
    from = to;
  }
  starts[groups] = static_cast<std::int64_t>(found);
  return found;
}

constexpr std::size_t kAhead = 12;

MEMHIER_INLINE void prefetch_row(const float* row, std::size_t floats) {
  for (std::size_t at = 0; at < floats; at += 16) __builtin_prefetch(row + at, 1);
}

MEMHIER_INLINE void prefetch_to_read(const float* row, std::size_t floats) {
  for (std::size_t at = 0; at < floats; at += 16) __builtin_prefetch(row + at);
}

// The sums of one table's rows: bags of ids, and where in the output each sum goes.
struct Pooling {
  const float* slab;
  std::size_t width;
  const std::int64_t* slots;    // of keys
  const std::int32_t* inverse;  // of ids
  const std::int64_t* begins;   // of bags, and the last one's end
  const std::int64_t* targets;  // of bags, in floats
  std::size_t dim;
  bool mean;
  float zero;  // that sums begin with: 0, or -0, which leaves a row as it is
  float* out;
};

MEMHIER_CLONES
void pool_table(const Pooling& p, std::size_t first, std::size_t last) {
  const auto end = static_cast<std::size_t>(p.begins[last]);
  for (std::size_t bag = first; bag < last; ++bag) {
    float* __restrict out = p.out + p.targets[bag];
    const auto from = static_cast<std::size_t>(p.begins[bag]), to = static_cast<std::size_t>(p.begins[bag + 1]);
    if (from == to) std::fill_n(out, p.dim, 0.0f);
    for (std::size_t at = from; at < to; ++at) {
      if (at + kAhead < end) prefetch_to_read(p.slab + p.slots[p.inverse[at + kAhead]] * p.width, p.dim);
      const float* __restrict row = p.slab + p.slots[p.inverse[at]] * p.width;
      if (at == from) {
        for (std::size_t d = 0; d < p.dim; ++d) out[d] = p.zero + row[d];
      } else {
        for (std::size_t d = 0; d < p.dim; ++d) out[d] += row[d];
      }
    }
    if (p.mean && to > from) {
      const auto length = static_cast<float>(to - from);
      for (std::size_t d = 0; d < p.dim; ++d) out[d] /= length;
    }
  }
}

constexpr std::int64_t kMean = 1, kRows = 3;  // modes

// tables: for each one its first bag, the one after its last, its dim, and its mode.
void pool(const Array<const float, 2>& slab, const Array<const std::int64_t, 1>& slots,
          const Array<const std::int32_t, 1>& inverse, const Array<const std::int64_t, 1>& begins,
          const Array<const std::int64_t, 1>& targets, const Array<const std::int64_t, 2>& tables,
          const Array<float>& out) {
  nb::gil_scoped_release released;
  for (std::size_t group = 0; group < tables.size() / 4; ++group) {
    const std::int64_t* table = tables.data() + 4 * group;
    const Pooling pooling{slab.data(),
                          slab.shape(1),
                          slots.data(),
                          inverse.data(),
                          begins.data(),
                          targets.data(),
                          static_cast<std::size_t>(table[2]),
                          table[3] == kMean,
                          table[3] == kRows ? -0.0f : 0.0f,
                          out.data()};
    if (static_cast<std::size_t>(table[1]) > targets.size() || pooling.dim > pooling.width)
      throw std::out_of_range("tables: bags that are there, dim within a row");
    pool_table(pooling, static_cast<std::size_t>(table[0]), static_cast<std::size_t>(table[1]));
  }
}

// The gradients of one table's rows, and the rule that they are applied by.
struct Update {
  float* slab;
  std::size_t width;
  const std::int64_t* slots;    // of keys
  const std::int32_t* inverse;  // of ids
  const std::int32_t* order;    // ids, sorted
  const std::int64_t* sources;  // of ids, in floats of `gradient`
  const float* scales;          // of ids; null for 1
  const float* gradient;
  std::size_t dim;
  float rate;  // the learning rate, negated; Adam's step size, negated
  float eps;
  float beta1, beta2;  // 1 minus each
};

MEMHIER_CLONES
void apply_sgd(const Update& u, std::size_t from, std::size_t to) {
  for (std::size_t at = from; at < to; ++at) {
    if (at + kAhead < to) prefetch_row(u.slab + u.slots[u.inverse[at + kAhead]] * u.width, u.dim);
    float* __restrict row = u.slab + u.slots[u.inverse[at]] * u.width;
    const float* __restrict g = u.gradient + u.sources[at];
    if (at + kAhead < to) prefetch_to_read(u.gradient + u.sources[at + kAhead], u.dim);
    const float scale = u.scales == nullptr ? 1.0f : u.scales[at];
    for (std::size_t d = 0; d < u.dim; ++d) row[d] = std::fma(u.rate, g[d] * scale, row[d]);
  }
}

// Adds up the gradients of the row that the ids from `at` on share, in sorted order; returns where the next row's
// begin.
MEMHIER_INLINE std::size_t add_up(const Update& u, std::size_t at, std::size_t to, float* sum) {
  const std::int32_t key = u.inverse[u.order[at]];
  bool first = true;
  for (; at < to && u.inverse[u.order[at]] == key; ++at) {
    const float* g = u.gradient + u.sources[u.order[at]];
    const float scale = u.scales == nullptr ? 1.0f : u.scales[u.order[at]];
    if (first) {
      for (std::size_t d = 0; d < u.dim; ++d) sum[d] = g[d] * scale;
    } else {
      for (std::size_t d = 0; d < u.dim; ++d) sum[d] += g[d] * scale;
    }
    first = false;
  }
  return at;
}

MEMHIER_INLINE float mean_square(const float* sum, std::size_t dim) {
  float total = 0;
  for (std::size_t d = 0; d < dim; ++d) {
    const float square = sum[d] * sum[d];
    total += square;
  }
  return total / static_cast<float>(dim);
}

enum Rule { sgd, adagrad, row_wise_adagrad, adam, row_wise_adam };

// Brings the optimizer's state up to date, row by row. `steps` gets the direction of a row's move; `roots` its
// divisor, squared: one number for each weight, or one for each row.
template <Rule rule>
MEMHIER_INLINE void update_state(const Update& u, float* state, float* step, float* root) {
  const std::size_t dim = u.dim;
  if constexpr (rule == adagrad) {
    for (std::size_t d = 0; d < dim; ++d) {
      const float square = step[d] * step[d];
      state[d] += square;
      root[d] = state[d];
    }
  } else if constexpr (rule == row_wise_adagrad) {
    *root = *state += mean_square(step, dim);
  } else {
    if constexpr (rule == row_wise_adam) {
      const float change = (mean_square(step, dim) - state[dim]) * u.beta2;
      *root = state[dim] += change;
    } else {
      for (std::size_t d = 0; d < dim; ++d) {
        const float square = step[d] * step[d];
        const float change = (square - state[dim + d]) * u.beta2;
        root[d] = state[dim + d] += change;
      }
    }
    for (std::size_t d = 0; d < dim; ++d) {
      const float change = (step[d] - state[d]) * u.beta1;
      step[d] = state[d] += change;
    }
  }
}

template <Rule rule>
MEMHIER_INLINE void update_states(const Update& u, std::size_t from, std::size_t to, float* steps, float* roots) {
  constexpr bool per_row = rule == row_wise_adagrad || rule == row_wise_adam;
  for (std::size_t at = from; at < to; steps += u.dim, roots += per_row ? 1 : u.dim) {
    float* state = u.slab + u.slots[u.inverse[u.order[at]]] * u.width + u.dim;
    if (at + kAhead < to) prefetch_row(u.slab + u.slots[u.inverse[u.order[at + kAhead]]] * u.width, u.width);
    at = add_up(u, at, to, steps);
    update_state<rule>(u, state, steps, roots);
  }
}

MEMHIER_CLONES void adagrad_states(const Update& u, std::size_t from, std::size_t to, float* steps, float* roots) {
  update_states<adagrad>(u, from, to, steps, roots);
}
MEMHIER_CLONES void adam_states(const Update& u, std::size_t from, std::size_t to, float* steps, float* roots) {
  update_states<adam>(u, from, to, steps, roots);
}

// Moves the rows of `keys`, whose roots have been drawn.
MEMHIER_CLONES
void take_steps(const Update& u, int rule, std::size_t first, std::size_t last, const float* steps,
                const float* roots) {
  const bool per_row = rule == row_wise_adagrad || rule == row_wise_adam;
  for (std::size_t key = first; key < last; ++key, steps += u.dim, roots += per_row ? 1 : u.dim) {
    float* row = u.slab + u.slots[key] * u.width;
    if (key + kAhead < last) prefetch_row(u.slab + u.slots[key + kAhead] * u.width, u.dim);
    if (rule == adagrad) {
      for (std::size_t d = 0; d < u.dim; ++d) row[d] = std::fma(u.rate, steps[d] / (roots[d] + u.eps), row[d]);
    } else if (rule == adam) {
      for (std::size_t d = 0; d < u.dim; ++d) {
        const float step = steps[d] / (roots[d] + u.eps) * u.rate;
        row[d] += step;
      }
    } else if (rule == row_wise_adagrad) {
      const float divisor = *roots + u.eps;
      for (std::size_t d = 0; d < u.dim; ++d) {
        const float step = steps[d] * u.rate / divisor;
        row[d] += step;
      }
    } else {
      const float divisor = *roots + u.eps;
      for (std::size_t d = 0; d < u.dim; ++d) {
        const float step = steps[d] / divisor * u.rate;
        row[d] += step;
      }
    }
  }
}

// The rows that an update changes, for both of its halves. tables: for each one its first id, the one after its last,
// its first key, the one after its last, and its dim. numbers: for each one rate, eps, beta1, beta2.
class UpdatedRows {
 public:
  UpdatedRows(int rule, Array<float, 2> slab, Array<const std::int64_t, 1> slots, Array<const std::int64_t, 2> tables,
              Array<const float, 2> numbers)
      : rule_(rule), slab_(std::move(slab)), slots_(std::move(slots)), tables_(std::move(tables)),
        numbers_(std::move(numbers)) {
    require(rule >= sgd && rule <= row_wise_adam, "rule: 0 to 4");
    require(numbers_.size() / 4 >= size(), "numbers: four for each table");
    for (std::size_t at = 0; at < size(); ++at) {
      const auto* t = table(at);
      const auto dim = static_cast<std::size_t>(t[4]);
      const std::size_t state = rule == adagrad ? dim : rule == adam ? 2 * dim : rule == row_wise_adagrad ? 1 : dim + 1;
      require(dim + (rule == sgd ? 0 : state) <= slab_.shape(1), "tables: weights and state within a row");
      require(static_cast<std::size_t>(t[3]) <= slots_.size(), "tables: keys that have slots");
      steps_ += steps_of(at);
      roots_ += roots_of(at);
    }
  }

  int rule() const { return rule_; }
  std::size_t size() const { return tables_.size() / 5; }
  const std::int64_t* table(std::size_t at) const { return tables_.data() + 5 * at; }
  // How many steps, and roots, there are of one table, and of all.
  std::size_t steps_of(std::size_t at) const {
    return static_cast<std::size_t>((table(at)[3] - table(at)[2]) * table(at)[4]);
  }
  std::size_t roots_of(std::size_t at) const {
    return static_cast<std::size_t>((table(at)[3] - table(at)[2]) * (per_row() ? 1 : table(at)[4]));
  }
  std::size_t steps() const { return steps_; }
  std::size_t roots() const { return roots_; }

  Update of(std::size_t at) const {
    const float* number = numbers_.data() + 4 * at;
    return {slab_.data(), slab_.shape(1), slots_.data(),
            nullptr,      nullptr,        nullptr,
            nullptr,      nullptr,        static_cast<std::size_t>(table(at)[4]),
            number[0],    number[1],      number[2],
            number[3]};
  }

 private:
  bool per_row() const { return rule_ == row_wise_adagrad || rule_ == row_wise_adam; }

  int rule_;
  Array<float, 2> slab_;
  Array<const std::int64_t, 1> slots_;
  Array<const std::int64_t, 2> tables_;
  Array<const float, 2> numbers_;
  std::size_t steps_ = 0, roots_ = 0;
};

// Plain descent moves the rows; the other rules update their state, and leave steps and roots for `take_all_steps`.
void update(const UpdatedRows& rows, const Array<const std::int32_t, 1>& inverse,
            const Array<const std::int32_t, 1>& order, const Array<const std::int64_t, 1>& sources,
            const std::optional<Array<const float, 1>>& scales, const Array<const float>& gradient,
            const Array<float, 1>& steps, const Array<float, 1>& roots) {
  const std::size_t ids = inverse.size();
  require((order.size() == ids || rows.rule() == sgd) && sources.size() == ids && (!scales || scales->size() == ids),
          "inverse, order, sources, scales: one for each id");
  for (std::size_t at = 0; at < rows.size(); ++at)
    require(static_cast<std::size_t>(rows.table(at)[1]) <= ids, "tables: ids that are there");
  require(rows.rule() == sgd || (steps.size() >= rows.steps() && roots.size() >= rows.roots()),
          "steps, roots: one for each weight, or row");
  nb::gil_scoped_release released;
  float *step = steps.data(), *root = roots.data();
  for (std::size_t at = 0; at < rows.size(); ++at) {
    Update u = rows.of(at);
    u.inverse = inverse.data();
    u.order = order.data();
    u.sources = sources.data();
    u.scales = scales ? scales->data() : nullptr;
    u.gradient = gradient.data();
    const auto from = static_cast<std::size_t>(rows.table(at)[0]), to = static_cast<std::size_t>(rows.table(at)[1]);
    switch (rows.rule()) {
      case sgd:
        apply_sgd(u, from, to);
        break;
      case adagrad:
        adagrad_states(u, from, to, step, root);
        break;
      case adam:
        adam_states(u, from, to, step, root);
        break;
      case row_wise_adagrad:
        update_states<row_wise_adagrad>(u, from, to, step, root);
        break;
      default:
        update_states<row_wise_adam>(u, from, to, step, root);
    }
    step += rows.steps_of(at);
    root += rows.roots_of(at);
  }
}

// `roots` are the square roots of those that `update` left.
void take_all_steps(const UpdatedRows& rows, const Array<const float, 1>& steps, const Array<const float, 1>& roots) {
  require(steps.size() >= rows.steps() && roots.size() >= rows.roots(), "steps, roots: all of them");
  nb::gil_scoped_release released;
  const float *step = steps.data(), *root = roots.data();
  for (std::size_t at = 0; at < rows.size(); ++at) {
    const auto* t = rows.table(at);
    take_steps(rows.of(at), rows.rule(), static_cast<std::size_t>(t[2]), static_cast<std::size_t>(t[3]), step, root);
    step += rows.steps_of(at);
    root += rows.roots_of(at);
  }
}

}  // namespace
}  // namespace memhier

void register_embedding(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  nb::class_<UpdatedRows>(m, "UpdatedRows")
      .def(nb::init<int, Array<float, 2>, Array<const std::int64_t, 1>, Array<const std::int64_t, 2>,
                    Array<const float, 2>>(),
           nb::kw_only(), "rule"_a, "slab"_a, "slots"_a, "tables"_a, "numbers"_a);
  m.def("embedding_distinct", &distinct, nb::kw_only(), "ids"_a, "ends"_a, "bases"_a, "like_torch"_a, "keys"_a,
        "starts"_a, "inverse"_a, "order"_a);
  m.def("embedding_pool", &pool, nb::kw_only(), "slab"_a, "slots"_a, "inverse"_a, "begins"_a, "targets"_a, "tables"_a,
        "out"_a);
  m.def("embedding_update", &update, nb::kw_only(), "rows"_a, "inverse"_a, "order"_a, "sources"_a, "scales"_a.none(),
        "gradient"_a, "steps"_a, "roots"_a);
  m.def("embedding_take_steps", &take_all_steps, nb::kw_only(), "rows"_a, "steps"_a, "roots"_a);
}
