// Verdicts by bets: right whatever the distribution, but for a chance of 10^-6.
//
// A bet of a share of its wealth on each number of a sample, in [0, 1], gains nothing on average if the mean is the
// number it bets against. So, by Ville's inequality, its wealth passes 1 / c with a chance of at most c (Waudby-Smith
// and Ramdas, arXiv 2010.09686). Samples of little variance decide after some dozen numbers.
#include "draw/verdicts.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace memhier {
namespace {

constexpr double kEndless = std::numeric_limits<double>::infinity();
constexpr double kError = 1e-6;
constexpr double kStakes[] = {0.05, 0.3, 0.95};  // with equal parts of the wealth
constexpr double kLikely = 7;                    // standard deviations within which a mean is proven
constexpr double kRanges[] = {20, 4, 0};  // and ranges over the size of the sample, as rare words may be far: from wide
constexpr double kSummed = 1e-9;          // the rounding of a mean score

struct Part {
  std::size_t first, stride;
};
constexpr Part kAll{0, 1}, kGuess{0, 3}, kProof{1, 3}, kRest{2, 3};

// Sums of logs as logs of products, which hold some hundred factors of [0.05, 1e12].
class LogSum {
 public:
  void add(double factor) {
    product_ *= factor;
    if (product_ < 1e-250 || product_ > 1e250) close();
  }
  double sum() {
    close();
    return sum_;
  }

 private:
  void close() {
    sum_ += std::log(product_);
    product_ = 1;
  }
  double product_ = 1, sum_ = 0;
};

// Whether the tail's share times the mean of numbers from `least` to `most` lies above a limit: 1, below: -1, open: 0.
template <class Number>
int sign_of(const Bounded& found, Part part, double least, double most, double limit, double tests,
            const Number& number) {
  const double width = most - least, against = (limit / found.tail - least) / width;
  if (against < 0) return 1;
  if (against > 1) return -1;
  const double inside = std::clamp(against, 1e-12, 1 - 1e-12);
  const auto share = [&](std::size_t i) { return std::clamp((number(found.evidence[i]) - least) / width, 0.0, 1.0); };
  double sum = 0, count = 0;
  for (std::size_t i = part.first; i < found.evidence.size(); i += part.stride, ++count) sum += share(i);
  const bool above = sum > inside * count;  // the one bet of two that can have won
  LogSum logs[std::size(kStakes)];
  for (std::size_t i = part.first; i < found.evidence.size(); i += part.stride) {
    const double gain = (share(i) - inside) / (above ? inside : inside - 1);
    for (std::size_t stake = 0; stake < std::size(kStakes); ++stake) logs[stake].add(1 + kStakes[stake] * gain);
  }
  const double wealth[] = {logs[0].sum(), logs[1].sum(), logs[2].sum()};
  const double largest = *std::max_element(std::begin(wealth), std::end(wealth));
  double all = 0;
  for (const double each : wealth) all += std::exp(each - largest);
  if (!(largest + std::log(all / static_cast<double>(std::size(kStakes))) >= std::log(2 * tests / kError))) return 0;
  return above ? 1 : -1;
}

// Differences of scores; zero for words that are out, whose share is zero.
double known(double away) { return away == -kEndless ? 0 : away; }

double head_sum(const Bounded& found, double level) {
  double sum = 0;
  for (const HeadWord& word : found.head) sum += word.share * known(word.score - level);
  return sum / found.total;
}

// Whether the mean score under the softmax of all words lies above a level. A word of the tail counts exp(score) *
// (score - level). Words of by far the least bounds count by these alone, as the others then have a range that some
// words drawn can tell.
int mean_above(const Bounded& found, double level, Part part, double tests) {
  const bool whole = found.cut == -kEndless;
  const double cut = whole ? found.best : found.cut, rare = whole ? found.best : found.rare;
  const double unseen = found.rare_sum * (1 + std::abs(level - rare)), head = head_sum(found, level);
  const auto number = [&](const DrawnWord& word) {
    return static_cast<double>(word.bound) >= rare ? word.kept * known(word.score - level) : 0;
  };
  const double least = -std::max(1.0, level - rare), most = std::max(0.0, cut - level);
  if (sign_of(found, part, least, most, unseen - head, tests, number) > 0) return 1;
  return sign_of(found, part, least, most, -unseen - head, tests, number) < 0 ? -1 : 0;
}

// Of equal scores the greater word is above, as in transformers; never the word itself, whose score may be rounded in
// another way.
template <class Word>
bool is_above(const Word& word, std::uint32_t row, double score) {
  return word.score > score ? word.row != row : word.score == score && word.row > row;
}

// Whether the words above a word have less than `top_p` together: sums are shares of the head's.
int in_nucleus(const Bounded& found, std::uint32_t row, double score, double top_p) {
  double above = 0;
  for (const HeadWord& word : found.head)
    if (is_above(word, row, score)) above += word.share;
  above /= found.total;
  const bool beyond = score <= found.cut;  // words of the tail may be above it
  if (above >= top_p * (1 + found.tail)) return -1;
  if (above + (beyond ? found.tail * (1 - top_p) : 0) < top_p) return 1;
  return sign_of(found, kAll, beyond ? top_p - 1 : 0, top_p, above - top_p, 1,
                 [&](const DrawnWord& word) { return word.kept * (top_p - (is_above(word, row, score) ? 1 : 0)); });
}

// Whether a word has at least the probability `least`, or is the likeliest.
int is_likely(const Bounded& found, double score, double least) {
  const double share = std::exp(score - found.best) / found.total / least;  // log Z must not be above it
  if (score >= std::max(found.best, found.cut) || share >= 1 + found.tail) return 1;
  if (share < 1 && score < found.best) return -1;
  return -sign_of(found, kAll, 0, 1, share - 1, 1, [](const DrawnWord& word) { return word.kept; });
}

// Whether the words whose scores are nearer to the mean score than a word's have less than `typical_p` together. Its
// equals are not nearer.
int is_typical(const Bounded& found, std::uint32_t row, double score, double typical_p) {
  const auto [low, high] = found.mean;
  // Whether words whose scores lie between two, without these, have more than `typical_p`.
  const auto mass_above = [&](double least, double most) {
    const auto inside = [&](const auto& word) {
      return word.score > least && word.score < most && word.score != score && word.row != row;
    };
    double head = 0;
    for (const HeadWord& word : found.head)
      if (inside(word)) head += word.share;
    return sign_of(found, kRest, -typical_p, 1 - typical_p, typical_p - head / found.total, 1,
                   [&](const DrawnWord& word) { return word.kept * ((inside(word) ? 1 : 0) - typical_p); });
  };
  if (mass_above(std::min(score, 2 * low - score), std::max(score, 2 * high - score)) < 0) return 1;
  if (low < score && score < high) return 0;
  return mass_above(std::min(score, 2 * high - score), std::max(score, 2 * low - score)) > 0 ? -1 : 0;
}

}  // namespace

Interval mean_score(const Bounded& found) {
  double kept = 0, away = 0, squares = 0, count = 0;
  const auto each = [&](const auto& call) {
    for (std::size_t i = kGuess.first; i < found.evidence.size(); i += kGuess.stride) call(found.evidence[i]);
  };
  const auto off = [&](const DrawnWord& word, double level) { return word.kept * known(word.score - level); };
  each([&](const DrawnWord& word) {
    kept += word.kept;
    away += off(word, found.best);
    ++count;
  });
  count = std::max(1.0, count);
  const double mass = 1 + found.tail * (kept / count);
  const double shift = (head_sum(found, found.best) + found.tail * (away / count)) / mass;
  const double middle = found.best + shift, mean = (away - kept * shift) / count;
  each([&](const DrawnWord& word) {
    const double apart = off(word, found.best) - word.kept * shift - mean;
    squares += apart * apart;
  });
  const double spread = std::sqrt(squares / count) / std::sqrt(count);
  const double span = found.tail > 0 ? (1 + std::abs(middle - found.rare)) / count : 0;
  Interval proven{-kEndless, kEndless};
  for (const double ranges : kRanges) {  // the last that is proven stays
    const double near = found.tail / mass * (kLikely * spread + ranges * span) + kSummed;
    if (mean_above(found, middle - near, kProof, 2 * std::size(kRanges)) > 0) proven.low = middle - near;
    if (mean_above(found, middle + near, kProof, 2 * std::size(kRanges)) < 0) proven.high = middle + near;
  }
  return proven;
}

int verdict_on(const Bounded& found, const Rule& rule, std::uint32_t row, double score) {
  int verdict = 1;
  if (rule.top_p > 0) verdict = in_nucleus(found, row, score, rule.top_p);
  if (rule.typical_p > 0) verdict = is_typical(found, row, score, rule.typical_p);
  if (rule.epsilon_cutoff > 0) verdict = is_likely(found, score, rule.epsilon_cutoff);
  if (rule.eta_cutoff > 0) {
    // The lower of two limits: a word stays if one of them lets it.
    const int unlikely = mean_above(found, score - std::log(rule.eta_cutoff) / 2, kAll, 1);
    verdict = std::max(is_likely(found, score, rule.eta_cutoff), -unlikely);
  }
  if (rule.min_p > 0) {
    const double limit = std::log(rule.min_p);
    if (score < found.best + limit) return -1;
    if (score < std::max(found.best, found.cut) + limit) return std::min(verdict, 0);
  }
  return verdict;
}

}  // namespace memhier
