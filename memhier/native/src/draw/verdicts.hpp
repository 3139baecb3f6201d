// Verdicts on a word drawn: does a truncation keep it? By exact scores of some words and bounds of all others.
//
// A truncation asks for the sign of a sum over all words, of exp of a word's score times a number of the word. The head
// gives its part; where the bounds leave the sign open, words drawn from the tail, with exact scores, are evidence for
// a mean. The word's information less the entropy, which typical and eta sampling ask for, is the mean score under the
// softmax less the word's score, so that log Z drops out.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace memhier {

// Truncations; see the class Truncation in Python. Zero for none.
struct Rule {
  double top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff;

  bool needs_mean() const { return typical_p > 0 || eta_cutoff > 0; }
  // Scores below it count for nothing, where `best` is the largest so far. For a nucleus they count.
  double floor(double best) const {
    return top_p > 0 ? -std::numeric_limits<double>::infinity() : best + std::log(min_p);
  }
};

// Scores are logits over the temperature.
struct HeadWord {
  std::uint32_t row;
  double score, share;  // share: exp of score less the largest
};

struct DrawnWord {
  std::uint32_t row;
  float bound;
  double score, kept;  // kept: exp of score less bound
};

struct Interval {
  double low, high;
};

// A head of words with exact scores, and a tail of bounds.
struct Bounded {
  std::vector<HeadWord> head;
  std::vector<DrawnWord> evidence;  // from the tail, each independent of all; none until it is asked for
  double best, total;               // the largest score of the head, and the sum of its shares
  double tail;                      // the sum of exp of the tail's bounds, as a share of the head's
  double cut;                       // the largest bound of the tail
  double rare, rare_sum;  // words of the tail with bounds below `rare`, and at least their sum as a share of the head's
  Interval mean;          // of the scores under the softmax of all words; for typical sampling alone
};

// From the first third of the evidence a guess, from the second a proof.
Interval mean_score(const Bounded& found);

// 1 if a word with this score stays, -1 if it goes, 0 if that is open.
int verdict_on(const Bounded& found, const Rule& rule, std::uint32_t row, double score);

}  // namespace memhier
