// The map in double precision, as NumPy makes it.
#include "search/query_space.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "scan/turn.hpp"

namespace memhier {
namespace {

constexpr double kNormMost = 1e18;  // squares of it are well within float
constexpr float kFar = 64;          // norm of an aim relative to that of centroids, as in the plain twin

double squared_norm(const float* values, std::size_t count, double scale) {
  double squared = 0;
#pragma omp simd reduction(+ : squared)
  for (std::size_t i = 0; i < count; ++i) squared += (values[i] * scale) * (values[i] * scale);
  return squared;
}

float weighted_norm(const float* values, const float* weights, std::size_t count, float divisor) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < count; ++i) sum += values[i] * values[i] * weights[i];
  return std::sqrt(sum / divisor);
}

}  // namespace

QuerySpace::QuerySpace(int metric, std::size_t dimension, double scale, std::optional<Array<const float, 2>> matrix,
                       std::optional<Array<const std::int64_t, 1>> order, std::optional<Array<const float, 1>> share,
                       std::optional<Array<const float, 1>> errors, float usual)
    : metric_(static_cast<Metric>(metric)), dimension_(dimension), padded_(matrix  ? matrix->shape(1)
                                                                           : order ? order->shape(0)
                                                                                   : 0),
      scale_(scale), matrix_(std::move(matrix)), order_(std::move(order)) {
  require(metric >= 0 && metric < kMetrics && scale > 0, "metric, scale: known, and above zero");
  require(matrix_.has_value() != order_.has_value(), "matrix, order: one of them");
  require(dimension > 0 && dimension <= padded_ && (!matrix_ || matrix_->has_shape(padded_, padded_)),
          "matrix, order: [padded, padded] or [padded], no fewer than the dimension");
  for (std::size_t i = 0; order_ && i < padded_; ++i)
    require((*order_)[i] >= 0 && (*order_)[i] < static_cast<std::int64_t>(padded_), "order: axes");
  require((metric_ == Metric::ip) == share.has_value() && share.has_value() == errors.has_value(),
          "share, errors: of inner products");
  if (!share) return;
  require(share->shape(0) == padded_ && errors->shape(0) == padded_ && padded_ >= 2, "share, errors: [padded]");
  inner_ = InnerErrors{std::move(*share), std::move(*errors), usual};
}

void QuerySpace::turn(const float* queries, std::size_t count, float* room, float* turned) const {
  const double widest = std::max(1.0, 1.0 / scale_);
  for (std::size_t q = 0; q < count; ++q) {
    const float* query = queries + q * dimension_;
    const double norm = std::sqrt(squared_norm(query, dimension_, scale_));
    if (norm * widest > kNormMost) throw std::overflow_error("queries: too large");
    const double divisor = metric_ == Metric::l2 || norm == 0 ? 1 : norm;
    float* const out = room + q * padded_;
    for (std::size_t i = 0; i < dimension_; ++i) out[i] = static_cast<float>(query[i] * scale_ / divisor);
    std::fill(out + dimension_, out + padded_, 0.0F);
    for (std::size_t i = 0; order_ && i < padded_; ++i)
      turned[q * padded_ + i] = out[static_cast<std::size_t>((*order_)[i])];
  }
  if (matrix_) memhier::turn({room, matrix_->data(), padded_, turned}, count);
}

void QuerySpace::aim(const float* turned, const Spread& spread, float* aim) const {
  std::copy_n(turned, padded_, aim);
  aim[padded_ - 2] = kBest * spread.along;
  for (std::size_t i = 0; i < padded_; ++i) aim[i] *= kFar;
}

Spread QuerySpace::spread(const float* turned) const {
  return {weighted_norm(turned, inner_->errors.data(), padded_, inner_->usual),
          weighted_norm(turned, inner_->share.data(), padded_, 1)};
}

QuerySpace::Distances::Distances(const QuerySpace& space, const float* query)
    : is_inner_(space.is_inner()),
      divisor_(space.metric_ == Metric::cosine ? 2 : static_cast<float>(space.scale_ * space.scale_)) {
  if (is_inner_) norm_ = std::sqrt(squared_norm(query, space.dimension_, 1)) / (2 * space.scale_);
}

}  // namespace memhier
