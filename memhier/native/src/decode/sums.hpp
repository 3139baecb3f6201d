// log Z: sums of exp over estimates of all rows, with exact logits in place of the estimates where they are known.
#pragma once

#include <cstddef>
#include <vector>

#include "decode/exact.hpp"
#include "decode/query.hpp"
#include "decode/scan.hpp"

namespace memhier {

struct SummedRows {
  const BlockCodes& blocks;
  const ExactRows& exact;
  Rounding rounding;  // of the hidden state at hand
  std::size_t count;  // of the rows in the sums
};

// Fills partition [3] with log of the sum of exp of all logits: the estimate, and its bounds.
void close_sums(const SummedRows& rows, const CodedQuery& query, const ExpSums& sums, const std::vector<Logit>& scored,
                const ScanOptions& options, double* partition);

}  // namespace memhier
