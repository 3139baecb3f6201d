// What a training step does to rows of float32 that lie in slots of a slab: which rows it needs, their sums, and the
// optimizers' updates, in the order and with the roundings of the sparse operators of PyTorch. Products and sums are
// contracted only where std::fma says so (this file is compiled with -ffp-contract=off), and square roots are left to
// PyTorch, whose own are not the nearest float everywhere.
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bind/buffer.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

using Access = Buffer::Access;

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
std::size_t distinct(nb::handle ids, nb::handle ends, nb::handle bases, bool like_torch, nb::handle keys,
                     nb::handle starts, nb::handle inverse, nb::handle order) {
  const Buffer all(ids, Access::read), tables(ends, Access::read), base(bases, Access::read);
  const Buffer out(keys, Access::write), begins(starts, Access::write), places(inverse, Access::write);
  const Buffer sorted(order, Access::write);
  const std::size_t count = all.count<std::int64_t>(), groups = tables.count<std::int64_t>();
  out.require(out.bytes() == all.bytes() && places.count<std::int32_t>() == count &&
                  (sorted.bytes() == 0 || sorted.count<std::int32_t>() == count) && count < (std::size_t{1} << 31),
              "keys, inverse, order: as long as ids, which are below 2^31");
  begins.require(begins.count<std::int64_t>() == groups + 1 && base.count<std::int64_t>() >= groups, "starts, bases");
  nb::gil_scoped_release released;
  std::vector<Occurrence> items, spare;
  std::size_t found = 0, from = 0;
  for (std::size_t table = 0; table < groups; ++table) {
    const auto to = static_cast<std::size_t>(tables.as<const std::int64_t>()[table]);
    if (to < from || to > count) throw std::out_of_range("ends: rising, up to the number of ids");
    items.clear();
    for (std::size_t at = from; at < to; ++at)
      items.push_back({all.as<const std::int64_t>()[at], static_cast<std::int64_t>(at)});
    if (like_torch) sort_like_torch(items);
    else sort_stably(items, spare);
    begins.as<std::int64_t>()[table] = static_cast<std::int64_t>(found);
    const std::size_t first = found;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i == 0 || items[i].id != items[i - 1].id)
        out.as<std::int64_t>()[found++] = items[i].id + base.as<const std::int64_t>()[table];
      places.as<std::int32_t>()[items[i].at] = static_cast<std::int32_t>(found - 1);
      if (sorted.bytes() != 0) sorted.as<std::int32_t>()[from + i] = static_cast<std::int32_t>(items[i].at);
    }
    assert(found >= first);
    from = to;
  }
  begins.as<std::int64_t>()[groups] = static_cast<std::int64_t>(found);
  return found;
}

constexpr std::size_t kAhead = 12;

MEMHIER_INLINE void prefetch_row(const float* row, std::size_t floats) {
  for (std::size_t at = 0; at < floats; at += 16) __builtin_prefetch(row + at, 1);
}

MEMHIER_INLINE void prefetch_to_read(const float* row, std::size_t floats) {
  for (std::size_t at = 0; at < floats; at += 16) __builtin_prefetch(row + at);
}

// What the rows of one table are to be summed for: bags of ids, and where in the output each sum goes.
struct Pooling {
  const float* slab;
  std::size_t width;
  const std::int64_t* slots;     // of keys
  const std::int32_t* inverse;   // of ids
  const std::int64_t* begins;    // of bags, and the last one's end
  const std::int64_t* targets;   // of bags, in floats
  std::size_t dim;
  bool mean;
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
        for (std::size_t d = 0; d < p.dim; ++d) out[d] = 0.0f + row[d];  // -0 becomes 0, as in a sum
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

// tables: for each one its first bag, the one after its last, its dim, and whether means are asked for.
void pool(nb::handle slab, nb::handle slots, nb::handle inverse, nb::handle begins, nb::handle targets,
          nb::handle tables, nb::handle out) {
  const Buffer rows(slab, Access::read), of_keys(slots, Access::read), of_ids(inverse, Access::read);
  const Buffer bags(begins, Access::read), goals(targets, Access::read), groups(tables, Access::read);
  const Buffer sums(out, Access::write);
  const auto* table = groups.as<const std::int64_t>();
  nb::gil_scoped_release released;
  for (std::size_t group = 0; group < groups.count<std::int64_t>() / 4; ++group, table += 4) {
    const Pooling pooling{rows.as<const float>(),
                          rows.shape(1),
                          of_keys.as<const std::int64_t>(),
                          of_ids.as<const std::int32_t>(),
                          bags.as<const std::int64_t>(),
                          goals.as<const std::int64_t>(),
                          static_cast<std::size_t>(table[2]),
                          table[3] != 0,
                          sums.as<float>()};
    if (static_cast<std::size_t>(table[1]) > goals.count<std::int64_t>() || pooling.dim > pooling.width)
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
  float beta1, beta2;  // what is left to 1
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

// Adds up the gradients of the row that the ids from `at` on share, in sorted order; returns where the next row's begin.
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

// Brings the optimizer's state up to date, row by row. `steps` gets what a row will move along; `roots` what that is to
// be divided by, squared: one number for each weight, or one for each row.
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
void take_steps(const Update& u, int rule, std::size_t first, std::size_t last, const float* steps, const float* roots) {
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

// What both halves of an update are given. tables: for each one its first id, the one after its last, its first key, the
// one after its last, and its dim. numbers: for each one rate, eps, beta1, beta2.
class Updates {
 public:
  Updates(int rule, nb::handle slab, nb::handle slots, nb::handle tables, nb::handle numbers)
      : rule_(rule),
        rows_(slab, Access::write),
        slots_(slots, Access::read),
        tables_(tables, Access::read),
        numbers_(numbers, Access::read) {
    rows_.require(rule >= sgd && rule <= row_wise_adam, "rule: 0 to 4");
    rows_.require(numbers_.count<float>() / 4 >= size(), "numbers: four for each table");
    for (std::size_t at = 0; at < size(); ++at) {
      const auto* t = table(at);
      const auto dim = static_cast<std::size_t>(t[4]);
      const std::size_t state = rule == adagrad ? dim : rule == adam ? 2 * dim : rule == row_wise_adagrad ? 1 : dim + 1;
      rows_.require(dim + (rule == sgd ? 0 : state) <= rows_.shape(1), "tables: weights and state within a row");
      rows_.require(static_cast<std::size_t>(t[3]) <= slots_.count<std::int64_t>(), "tables: keys that have slots");
    }
  }

  std::size_t size() const { return tables_.count<std::int64_t>() / 5; }
  const std::int64_t* table(std::size_t at) const { return tables_.as<const std::int64_t>() + 5 * at; }
  bool per_row() const { return rule_ == row_wise_adagrad || rule_ == row_wise_adam; }

  Update of(std::size_t at) const {
    const auto* number = numbers_.as<const float>() + 4 * at;
    return {rows_.as<float>(), rows_.shape(1), slots_.as<const std::int64_t>(), nullptr, nullptr, nullptr, nullptr,
            nullptr, static_cast<std::size_t>(table(at)[4]), number[0], number[1], number[2], number[3]};
  }

 private:
  int rule_;
  Buffer rows_, slots_, tables_, numbers_;
};

// Plain descent moves the rows; the other rules update their state, and leave steps and roots for `take_all_steps`.
void update(int rule, nb::handle slab, nb::handle slots, nb::handle tables, nb::handle numbers, nb::handle inverse,
            nb::handle order, nb::handle sources, nb::handle scales, nb::handle gradient, nb::handle steps,
            nb::handle roots) {
  const Updates all(rule, slab, slots, tables, numbers);
  const Buffer of_ids(inverse, Access::read), sorted(order, Access::read), origins(sources, Access::read);
  const Buffer factors = Buffer::optional(scales, Access::read), gradients(gradient, Access::read);
  const Buffer moves(steps, Access::write), squares(roots, Access::write);
  const std::size_t ids = of_ids.count<std::int32_t>();
  of_ids.require((sorted.bytes() == of_ids.bytes() || rule == sgd) && origins.count<std::int64_t>() == ids &&
                     (factors.empty() || factors.count<float>() == ids),
                 "inverse, order, sources, scales: one for each id");
  std::size_t needed = 0, needed_roots = 0;
  for (std::size_t at = 0; at < all.size(); ++at) {
    const auto* t = all.table(at);
    of_ids.require(static_cast<std::size_t>(t[1]) <= ids, "tables: ids that are there");
    needed += static_cast<std::size_t>((t[3] - t[2]) * t[4]);
    needed_roots += static_cast<std::size_t>((t[3] - t[2]) * (all.per_row() ? 1 : t[4]));
  }
  of_ids.require(rule == sgd || (moves.count<float>() >= needed && squares.count<float>() >= needed_roots),
                 "steps, roots: one for each weight, or row");
  nb::gil_scoped_release released;
  float *step = moves.as<float>(), *root = squares.as<float>();
  for (std::size_t at = 0; at < all.size(); ++at) {
    Update u = all.of(at);
    u.inverse = of_ids.as<const std::int32_t>();
    u.order = sorted.as<const std::int32_t>();
    u.sources = origins.as<const std::int64_t>();
    u.scales = factors.empty() ? nullptr : factors.as<const float>();
    u.gradient = gradients.as<const float>();
    const auto* t = all.table(at);
    const auto from = static_cast<std::size_t>(t[0]), to = static_cast<std::size_t>(t[1]);
    switch (rule) {
      case sgd: apply_sgd(u, from, to); break;
      case adagrad: adagrad_states(u, from, to, step, root); break;
      case adam: adam_states(u, from, to, step, root); break;
      case row_wise_adagrad: update_states<row_wise_adagrad>(u, from, to, step, root); break;
      default: update_states<row_wise_adam>(u, from, to, step, root);
    }
    step += (t[3] - t[2]) * t[4];
    root += (t[3] - t[2]) * (all.per_row() ? 1 : t[4]);
  }
}

// `roots` are those of what `update` left there.
void take_all_steps(int rule, nb::handle slab, nb::handle slots, nb::handle tables, nb::handle numbers, nb::handle steps,
                    nb::handle roots) {
  const Updates all(rule, slab, slots, tables, numbers);
  const Buffer moves(steps, Access::read), divisors(roots, Access::read);
  std::size_t needed = 0, needed_roots = 0;
  for (std::size_t at = 0; at < all.size(); ++at) {
    const auto* t = all.table(at);
    needed += static_cast<std::size_t>((t[3] - t[2]) * t[4]);
    needed_roots += static_cast<std::size_t>((t[3] - t[2]) * (all.per_row() ? 1 : t[4]));
  }
  moves.require(moves.count<float>() >= needed && divisors.count<float>() >= needed_roots, "steps, roots: all of them");
  nb::gil_scoped_release released;
  const float *step = moves.as<const float>(), *root = divisors.as<const float>();
  for (std::size_t at = 0; at < all.size(); ++at) {
    const auto* t = all.table(at);
    take_steps(all.of(at), rule, static_cast<std::size_t>(t[2]), static_cast<std::size_t>(t[3]), step, root);
    step += (t[3] - t[2]) * t[4];
    root += (t[3] - t[2]) * (all.per_row() ? 1 : t[4]);
  }
}

}  // namespace
}  // namespace memhier

void register_embedding(nb::module_& m) {
  m.def("embedding_distinct", &memhier::distinct, nb::arg("ids"), nb::arg("ends"), nb::arg("bases"),
        nb::arg("like_torch"), nb::arg("keys"), nb::arg("starts"), nb::arg("inverse"), nb::arg("order"));
  m.def("embedding_pool", &memhier::pool, nb::arg("slab"), nb::arg("slots"), nb::arg("inverse"), nb::arg("begins"),
        nb::arg("targets"), nb::arg("tables"), nb::arg("out"));
  m.def("embedding_update", &memhier::update, nb::arg("rule"), nb::arg("slab"), nb::arg("slots"), nb::arg("tables"),
        nb::arg("numbers"), nb::arg("inverse"), nb::arg("order"), nb::arg("sources"), nb::arg("scales").none(),
        nb::arg("gradient"), nb::arg("steps"), nb::arg("roots"));
  m.def("embedding_take_steps", &memhier::take_all_steps, nb::arg("rule"), nb::arg("slab"), nb::arg("slots"),
        nb::arg("tables"), nb::arg("numbers"), nb::arg("steps"), nb::arg("roots"));
}
