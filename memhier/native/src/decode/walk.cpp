// The best-first walk, on lists that one thread owns.
#include "decode/walk.hpp"

#include <algorithm>

#include "bind/simd.hpp"

namespace memhier {
namespace {

constexpr std::size_t kSome = 32;  // codes on their way from memory while as many are multiplied

void prefetch(const RowCodes& rows, std::uint32_t row) {
  const std::uint8_t* code = rows.codes + std::size_t{row} * rows.width;
  for (std::size_t at = 0; at < rows.width; at += 64) __builtin_prefetch(code + at);
  __builtin_prefetch(code + rows.width - 1);
  __builtin_prefetch(rows.offsets + row);
  __builtin_prefetch(rows.scales + row);
}

}  // namespace

void Walker::begin(std::size_t rows) {
  if (visited_.size() < rows) visited_.resize(rows, 0);
  if (++turn_ == 0) {
    std::fill(visited_.begin(), visited_.end(), std::uint16_t{0});
    turn_ = 1;
  }
  list_.clear();
}

float Walker::approach(const Seeds& seeds, const CodedQuery& query, std::size_t width) {
  groups_.clear();
  float nearest = kInfinity;
  for (std::size_t g = 0; g < seeds.groups; ++g) {
    const float away = seeds.halves[g] - dot_floats(seeds.centres + g * width, query.z(), width);
    nearest = std::min(nearest, away);
    groups_.emplace_back(away, static_cast<std::uint32_t>(g));
  }
  return std::max(0.F, 2 * nearest + dot_floats(query.z(), query.z(), width));
}

void Walker::estimate(const RowCodes& rows, const CodedQuery& query) {
  const std::size_t count = fresh_.size();
  dots_.resize(std::max(count, dots_.size()));
  estimates_.resize(std::max(count, estimates_.size()));
  const auto fetch = [&](std::size_t first) {
    for (std::size_t i = first; i < std::min(first + kSome, count); ++i) prefetch(rows, fresh_[i]);
  };
  fetch(0);
  for (std::size_t first = 0; first < count; first += kSome) {
    fetch(first + kSome);
    dot_codes(rows.codes, rows.width, fresh_.data() + first, std::min(kSome, count - first), query.bytes(),
              dots_.data() + first);
  }
  for (std::size_t i = 0; i < count; ++i)
    estimates_[i] =
        rows.offsets[fresh_[i]] + rows.scales[fresh_[i]] * (query.step() * static_cast<float>(dots_[i] - excess_));
}

void Walker::plant(const RowCodes& rows, const Seeds& seeds, const CodedQuery& query, std::size_t probes,
                   std::size_t keep) {
  fresh_.clear();
  const auto chosen = groups_.begin() + static_cast<std::ptrdiff_t>(std::min(probes, groups_.size()));
  std::partial_sort(groups_.begin(), chosen, groups_.end());
  for (auto group = groups_.begin(); group != chosen; ++group)
    for (std::int64_t i = seeds.starts[group->second]; i < seeds.starts[group->second + 1]; ++i)
      if (visit(seeds.rows[i])) fresh_.push_back(seeds.rows[i]);
  estimate(rows, query);
  for (std::size_t i = 0; i < fresh_.size(); ++i) list_.push_back({estimates_[i], fresh_[i], false});
  const auto better = [](const Step& a, const Step& b) {
    return a.estimate > b.estimate || (a.estimate == b.estimate && a.row < b.row);
  };
  const auto last = list_.begin() + static_cast<std::ptrdiff_t>(std::min(keep, list_.size()));
  if (last != list_.end()) std::nth_element(list_.begin(), last, list_.end(), better);
  list_.erase(last, list_.end());
  std::sort(list_.begin(), list_.end(), better);
}

// Puts a row in its place among the `ef` best; `at` is that place.
bool Walker::insert(float estimate, std::uint32_t row, std::size_t ef, std::size_t& at) {
  if (list_.size() == ef && estimate <= list_.back().estimate) return false;
  const auto place = std::upper_bound(list_.begin(), list_.end(), estimate,
                                      [](float value, const Step& step) { return value > step.estimate; });
  at = static_cast<std::size_t>(place - list_.begin());
  if (list_.size() == ef) list_.pop_back();
  list_.insert(list_.begin() + static_cast<std::ptrdiff_t>(at), {estimate, row, false});
  return true;
}

std::size_t Walker::run(const RowCodes& rows, const Graph& graph, const Seeds& seeds, const CodedQuery& query,
                        const Effort& effort, const AllowedRows& allowed, std::vector<Logit>& candidates) {
  const auto [probes, ef, limit] = effort;
  begin(rows.rows);
  excess_ = query.excess(rows.width);
  // A list of twice the length holds the allowed rows, if half of all are.
  const std::size_t keep = std::max(ef, limit) * (allowed.all() ? 1 : 2);
  list_.reserve(keep + 1);
  plant(rows, seeds, query, probes, keep);
  std::size_t looked = fresh_.size();
  // Everything before `next` has been expanded. Only the `ef` best are.
  for (std::size_t next = 0; graph.degree > 0 && next < std::min(ef, list_.size());) {
    if (list_[next].expanded) {
      ++next;
      continue;
    }
    list_[next].expanded = true;
    const std::uint32_t* links = graph.links + std::size_t{list_[next].row} * graph.degree;
    fresh_.clear();
    for (std::size_t i = 0; i < graph.degree && links[i] != kNoRow; ++i)
      if (visit(links[i])) fresh_.push_back(links[i]);
    estimate(rows, query);
    looked += fresh_.size();
    for (std::size_t i = 0; i < fresh_.size(); ++i) {
      std::size_t at;
      if (insert(estimates_[i], fresh_[i], keep, at)) next = std::min(next, at);
    }
  }
  collect(query, allowed, limit, candidates);
  return looked;
}

void Walker::collect(const CodedQuery& query, const AllowedRows& allowed, std::size_t limit,
                     std::vector<Logit>& candidates) const {
  candidates.clear();
  for (const Step& step : list_) {
    if (candidates.size() == limit) return;
    const float estimate = step.estimate + query.shift();
    if (allowed.has(step.row)) candidates.push_back({estimate, estimate, step.row});
  }
  if (!allowed.all() && candidates.size() < limit) candidates.clear();
}

std::size_t Walker::planned_bytes(std::size_t rows, const Seeds& seeds, std::size_t keep) {
  const std::size_t planted = std::min(rows, static_cast<std::size_t>(seeds.starts[seeds.groups]));
  const std::size_t each = sizeof(std::uint32_t) + sizeof(std::int32_t) + sizeof(float);
  return rows * sizeof(std::uint16_t) + 2 * (std::max(planted, keep) + 1) * (each + sizeof(Step)) +
         2 * seeds.groups * sizeof(std::pair<float, std::uint32_t>);
}

std::size_t Walker::bytes() const {
  return visited_.capacity() * sizeof(std::uint16_t) + fresh_.capacity() * sizeof(std::uint32_t) +
         dots_.capacity() * sizeof(std::int32_t) + estimates_.capacity() * sizeof(float) +
         list_.capacity() * sizeof(Step) + groups_.capacity() * sizeof(groups_[0]);
}

}  // namespace memhier
