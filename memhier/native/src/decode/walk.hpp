// A best-first walk over a graph of rows, from seeds that the query's neighbourhood of contexts suggests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "decode/allowed.hpp"
#include "decode/exact.hpp"
#include "decode/query.hpp"

namespace memhier {

constexpr std::uint32_t kNoRow = 0xffffffff;

// Codes [rows, width] by row, as signed bytes with 128 added.
struct RowCodes {
  const std::uint8_t* codes;
  std::size_t rows, width;
  const float* offsets;
  const float* scales;
};

struct Graph {
  const std::uint32_t* links;  // [rows, degree], kNoRow where there are fewer; degree 0: no walk, seeds alone
  std::size_t degree;
};

// Rows that were among the largest of contexts like these: those of group g from starts[g] to starts[g + 1].
struct Seeds {
  const float* centres;  // [groups, width], in the coordinates of the codes
  const float* halves;   // [groups]: half the squared norm of each
  const std::int64_t* starts;
  const std::uint32_t* rows;
  std::size_t groups;
};

// Groups whose seeds a walk starts from, its list, and the candidates that it leaves.
struct Effort {
  std::size_t probes, ef, limit;
};

class Walker {
 public:
  // Takes a query, and returns its squared distance to the nearest centre.
  float approach(const Seeds& seeds, const CodedQuery& query, std::size_t width);

  // Fills candidates with the `limit` best allowed rows that a list of the `ef` best led to, for the query last
  // approached, or with none where the list holds fewer. Returns how many rows it looked at.
  std::size_t run(const RowCodes& rows, const Graph& graph, const Seeds& seeds, const CodedQuery& query,
                  const Effort& effort, const AllowedRows& allowed, std::vector<Logit>& candidates);

  // With lists of at most `keep`, and twice the room where something grows one by one.
  static std::size_t planned_bytes(std::size_t rows, const Seeds& seeds, std::size_t keep);
  std::size_t bytes() const;

 private:
  struct Step {
    float estimate;
    std::uint32_t row;
    bool expanded;
  };

  void begin(std::size_t rows);
  void plant(const RowCodes& rows, const Seeds& seeds, const CodedQuery& query, std::size_t probes, std::size_t keep);
  void collect(const CodedQuery& query, const AllowedRows& allowed, std::size_t limit,
               std::vector<Logit>& candidates) const;
  void estimate(const RowCodes& rows, const CodedQuery& query);
  bool insert(float estimate, std::uint32_t row, std::size_t ef, std::size_t& at);
  bool visit(std::uint32_t row) {
    if (visited_[row] == turn_) return false;
    visited_[row] = turn_;
    return true;
  }

  std::vector<std::uint16_t> visited_;
  std::uint16_t turn_ = 0;
  std::vector<std::uint32_t> fresh_;  // rows about to be looked at
  std::vector<std::int32_t> dots_;
  std::vector<float> estimates_;
  std::vector<Step> list_;  // best first
  std::vector<std::pair<float, std::uint32_t>> groups_;
  std::int32_t excess_ = 0;
};

}  // namespace memhier
