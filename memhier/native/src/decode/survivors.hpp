// The candidates that a scan of the leading directions left, estimated again by all directions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/exact.hpp"
#include "decode/query.hpp"
#include "decode/walk.hpp"

namespace memhier {

class Survivors {
 public:
  // Leaves the `limit` best candidates by the codes of all directions.
  void refine(const RowCodes& codes, const CodedQuery& query, std::vector<Logit>& found, std::size_t limit);

  static std::size_t planned_bytes(std::size_t count) { return count * (sizeof(std::uint32_t) + sizeof(std::int32_t)); }
  std::size_t bytes() const {
    return rows_.capacity() * sizeof(std::uint32_t) + dots_.capacity() * sizeof(std::int32_t);
  }

 private:
  std::vector<std::uint32_t> rows_;
  std::vector<std::int32_t> dots_;
};

}  // namespace memhier
