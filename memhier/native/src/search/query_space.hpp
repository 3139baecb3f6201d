// The map of queries into the axes of the codes: PreviewSpace and CodeBook.turn of the plain twin, for one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "bind/array.hpp"
#include "rank/distance.hpp"
#include "scan/scanner.hpp"

namespace memhier {

// The numbers of a code book that tell how wrong its products are with a query of length one: [d] each, and one.
struct InnerErrors {
  Array<const float, 1> share, errors;
  float usual;
};

// A vector is scaled, padded with zeros to `padded` values, and turned by a matrix [padded, padded], or has its values
// in another order, [padded]. Inner products have `inner`.
class QuerySpace {
 public:
  QuerySpace(int metric, std::size_t dimension, double scale, std::optional<Array<const float, 2>> matrix,
             std::optional<Array<const std::int64_t, 1>> order, std::optional<Array<const float, 1>> share,
             std::optional<Array<const float, 1>> errors, float usual);

  Metric metric() const { return metric_; }
  std::size_t dimension() const { return dimension_; }
  std::size_t padded() const { return padded_; }
  bool is_inner() const { return inner_.has_value(); }

  // Fills turned [count, padded] of queries [count, dimension]; `room` is as large. Throws std::overflow_error for a
  // query to which distances overflow.
  void turn(const float* queries, std::size_t count, float* room, float* turned) const;

  // Of a turned query of inner products, and the point by which the router finds its lists, [padded].
  Spread spread(const float* turned) const;
  void aim(const float* turned, const Spread& spread, float* aim) const;

  // The factor from remoteness in the space to distances of a query by the metric.
  class Distances {
   public:
    Distances(const QuerySpace& space, const float* query);
    float operator()(float remoteness) const {
      if (!is_inner_) return remoteness / divisor_;
      return std::isinf(remoteness) ? remoteness : static_cast<float>(remoteness * norm_);
    }

   private:
    const bool is_inner_;
    float divisor_ = 1;
    double norm_ = 0;
  };

 private:
  Metric metric_;
  std::size_t dimension_, padded_;
  double scale_;
  std::optional<Array<const float, 2>> matrix_;
  std::optional<Array<const std::int64_t, 1>> order_;
  std::optional<InnerErrors> inner_;
};

}  // namespace memhier
