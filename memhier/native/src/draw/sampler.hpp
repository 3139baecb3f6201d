// A draw of one word from the softmax of all logits, exact in distribution, by an envelope.
//
// A draw takes the head, of exact scores, or the tail by the sum of exp of both, bounds in the place of scores for the
// tail; a word of the tail stays with the probability exp(score - bound), else the draw begins anew. A truncation asks
// if the word drawn stays: by the head and the tail's sums, then by words drawn from the tail as evidence. Where that
// leaves it open, the head grows, and the same word is asked for again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "draw/envelope.hpp"
#include "draw/verdicts.hpp"

namespace memhier {

// Numbers in [0, 1) by splitmix64 (Steele, Lea and Flood 2014).
class Uniforms {
 public:
  explicit Uniforms(std::uint64_t seed) : state_(seed) {}
  double next() {
    std::uint64_t mixed = state_ += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return static_cast<double>((mixed ^ (mixed >> 31)) >> 11) * 0x1p-53;
  }

 private:
  std::uint64_t state_;
};

struct Stage {
  std::size_t limit, evidence;  // words of the head, and words drawn
};

// Words with other scores than their logits give; -1 for none.
struct ChangedWords {
  std::span<const std::int64_t> rows;
  std::span<const double> scores;
};

struct DrawCall {
  Rule rule;
  Shape shape;
  double temperature;
  double rounding;  // the most by which logits are rounded, as a share
  std::size_t words;
  std::span<const Stage> stages;
  // Exact logits of the model for rows of the layer, in their order.
  std::function<void(std::vector<Logit>& rows, std::vector<double>& logits)> logits;
};

class Sampler {
 public:
  // The word drawn, and whether it stays: 1, or 0 if that is open, then -1 for no word.
  struct Drawn {
    std::int64_t row;
    int stays;
  };
  // The envelope is opened, without the changed words.
  Drawn draw(const DrawCall& call, Envelope& envelope, Largest& largest, const ChangedWords& changed,
             Uniforms& uniforms);

  std::size_t held_bytes() const {
    return found_.head.capacity() * sizeof(HeadWord) +
           (found_.evidence.capacity() + tries_.capacity()) * sizeof(DrawnWord) + numbers_.capacity() * sizeof(double) +
           order_.capacity() * sizeof(std::uint32_t) + (rows_.capacity() + drawn_.capacity()) * sizeof(Logit);
  }
  // With heads of so many rows; half as many are added, or drawn, at a time.
  static std::size_t planned_bytes(std::size_t most) {
    return most * sizeof(HeadWord) +
           most / 2 * (sizeof(DrawnWord) + sizeof(double) + 2 * sizeof(std::uint32_t) + 2 * sizeof(Logit)) +
           sizeof(std::uint32_t) + 32 * sizeof(DrawnWord);
  }

 private:
  void extend(const DrawCall& call, Envelope& envelope, Largest& largest, std::size_t limit);
  void draw_tail(const DrawCall& call, const Envelope& envelope, Uniforms& uniforms, std::size_t count,
                 std::vector<DrawnWord>& words);
  bool attempt(const DrawCall& call, const Envelope& envelope, Uniforms& uniforms, HeadWord& word);

  Bounded found_;
  std::vector<DrawnWord> tries_;  // not yet used
  double slack_ = 0;
  std::vector<double> numbers_;  // uniform ones, or logits
  std::vector<std::uint32_t> order_;
  std::vector<Logit> rows_, drawn_;
};

}  // namespace memhier
