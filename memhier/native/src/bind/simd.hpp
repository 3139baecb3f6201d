// The base of vectorised loops: clones for several instruction sets, chosen at load time, and half precision.
#pragma once

#include <bit>
#include <cstdint>

// Clones need ifunc, which musl and Mach-O lack; under a sanitizer the resolver runs before the runtime is up.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define MEMHIER_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEMHIER_CLONES
#endif
#define MEMHIER_INLINE __attribute__((always_inline)) inline

namespace memhier {

// Plain arithmetic without branches, so that loops over it vectorise: GCC 12 does not vectorise _Float16.
MEMHIER_INLINE float half_to_float(std::uint32_t half) {
  const std::uint32_t magnitude = (half & 0x7fff) << 13;
  // Exponent biases differ by 112; a subnormal is built one exponent higher, where subtracting 2^-14 is exact.
  const float normal = std::bit_cast<float>(magnitude + (112u << 23));
  const float subnormal = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  const float special = std::bit_cast<float>(magnitude | 0x7f800000u);
  const std::uint32_t exponent = half & 0x7c00;
  const float value = exponent == 0 ? subnormal : exponent == 0x7c00 ? special : normal;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | (half & 0x8000) << 16);
}

}  // namespace memhier
