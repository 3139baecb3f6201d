// Heads that grow, words drawn from the tail, and tries until one stays.
#include "draw/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace memhier {
namespace {

constexpr int kTries = 32;
constexpr std::size_t kTriesAtOnce = 16;  // ranked together, as rows on SSD are read in one submission
constexpr double kNothing = 1e-300, kLeast = -1e300;
constexpr double kRare = 8;  // words with bounds below some together have at most exp of minus this of the tail

}  // namespace

// Adds the rows of the largest bounds to the head, and sums the rest.
void Sampler::extend(const DrawCall& call, Envelope& envelope, Largest& largest, std::size_t limit) {
  envelope.take(limit, largest, rows_);
  call.logits(rows_, numbers_);
  found_.head.reserve(found_.head.size() + rows_.size());
  for (std::size_t i = 0; i < rows_.size(); ++i)
    found_.head.push_back({rows_[i].row, numbers_[i] / call.temperature, 0});
  Bounded& found = found_;
  found.evidence.clear();
  tries_.clear();
  const double largest_bound = static_cast<double>(call.shape.inverse) * static_cast<double>(envelope.largest());
  slack_ = envelope.is_empty() ? 0 : call.rounding * std::abs(largest_bound);
  found.cut = largest_bound + slack_;
  found.best = -static_cast<double>(kInfinity);
  for (const HeadWord& word : found.head) found.best = std::max(found.best, word.score);
  const double floor = call.rule.floor(found.best);
  found.total = 0;
  for (HeadWord& word : found.head)
    found.total += word.share = word.score < floor ? 0 : std::exp(word.score - std::max(found.best, kLeast));
  found.total = std::max(found.total, kNothing);
  const double whole = found.best + std::log(found.total), log_sum = envelope.log_sum() + slack_;
  found.tail = std::exp(log_sum - whole);
  if (envelope.is_empty() || found.cut < floor) found.tail = 0;
  found.rare = found.cut;
  found.rare_sum = 0;
  if (!call.rule.needs_mean() || envelope.is_empty()) return;
  const double words = std::log(static_cast<double>(call.words));
  found.rare = found.cut - kRare - words + std::clamp(log_sum - found.cut, 0.0, words);
  found.rare_sum = std::exp(found.rare + words - whole);
}

// Draws words from the tail, each independent of all, with exact scores.
void Sampler::draw_tail(const DrawCall& call, const Envelope& envelope, Uniforms& uniforms, std::size_t count,
                        std::vector<DrawnWord>& words) {
  numbers_.reserve(count);
  numbers_.resize(count);
  std::generate(numbers_.begin(), numbers_.end(), [&] { return uniforms.next(); });
  envelope.draw(numbers_.data(), count, order_, drawn_);
  // A row that is drawn several times is ranked once.
  rows_.clear();
  rows_.reserve(count);
  std::unique_copy(drawn_.begin(), drawn_.end(), std::back_inserter(rows_),
                   [](const Logit& a, const Logit& b) { return a.row == b.row; });
  call.logits(rows_, numbers_);
  words.clear();
  words.reserve(count);
  words.resize(count);
  for (std::size_t i = 0, at = 0; i < count; ++i) {
    at += drawn_[i].row != rows_[at].row;
    const double score = numbers_[at] / call.temperature;
    const double bound = static_cast<double>(call.shape.inverse) * static_cast<double>(drawn_[i].key) + slack_;
    words[order_[i]] = {drawn_[i].row, static_cast<float>(bound), score, std::exp(std::min(score - bound, 0.0))};
  }
}

// Draws a word from head or tail; false where that of the tail does not stay.
bool Sampler::attempt(const DrawCall& call, const Envelope& envelope, Uniforms& uniforms, HeadWord& word) {
  const double side = uniforms.next() * (1 + found_.tail);  // in units of the head
  if (side < 1) {
    double sum = 0, left = 0;
    word = found_.head.front();
    for (const HeadWord& each : found_.head) sum += each.share;
    for (const HeadWord& each : found_.head) {
      if (each.share <= 0) continue;
      word = each;  // rounding may leave a little after the last
      if ((left += each.share) > side * sum) break;
    }
    return true;
  }
  if (tries_.empty()) draw_tail(call, envelope, uniforms, kTriesAtOnce, tries_);
  const DrawnWord drawn = tries_.back();
  tries_.pop_back();
  word = {drawn.row, drawn.score, 0};
  return uniforms.next() < drawn.kept;
}

Sampler::Drawn Sampler::draw(const DrawCall& call, Envelope& envelope, Largest& largest, const ChangedWords& changed,
                             Uniforms& uniforms) {
  HeadWord word{};
  bool pending = false;
  std::size_t taken = 0;
  found_.head.clear();
  found_.head.reserve(changed.rows.size());
  for (std::size_t i = 0; i < changed.rows.size(); ++i)
    if (changed.rows[i] >= 0)
      found_.head.push_back({static_cast<std::uint32_t>(changed.rows[i]), changed.scores[i], 0});
  for (const Stage& stage : call.stages) {
    extend(call, envelope, largest, stage.limit - taken);
    taken = stage.limit;
    const auto weigh = [&] {
      if (found_.tail > 0) draw_tail(call, envelope, uniforms, stage.evidence, found_.evidence);
      if (call.rule.typical_p > 0) found_.mean = mean_score(found_);
    };
    if (call.rule.needs_mean()) weigh();
    for (int i = 0; i < kTries; ++i) {
      if (!pending && !attempt(call, envelope, uniforms, word)) continue;
      pending = true;
      int verdict = verdict_on(found_, call.rule, word.row, word.score);
      if (verdict == 0 && found_.evidence.empty() && found_.tail > 0) {
        weigh();
        verdict = verdict_on(found_, call.rule, word.row, word.score);
      }
      if (verdict > 0) return {word.row, 1};
      if (verdict == 0) break;
      pending = false;
    }
  }
  return {pending ? static_cast<std::int64_t>(word.row) : -1, 0};
}

}  // namespace memhier
