// The tokens that may win a race, of a row of logits: bounds in fp32 leave a few of them. ops.h specifies it.

#include "race.h"

#include "ops.h"

namespace quire::QUIRE_ISA {

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;  // every supported CPU has these
#endif
constexpr int kLanes = kBytes / 4;

typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));
typedef uint64_t Longs __attribute__((vector_size(kBytes)));

template <class To, class From>
QUIRE_ALWAYS_INLINE To cast(From from) {  // the same bits
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// exp(x) to a relative 1e-5, for x in [-32, 0].
QUIRE_ALWAYS_INLINE Floats fast_exp(Floats x) {
    constexpr float rounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    const Floats y = x * 1.44269504f, shifted = y + rounding;
    const Floats r = y - (shifted - rounding);  // |r| <= 0.5
    Floats e = r * 0.00133336f + 0.00961813f;
    e = e * r + 0.05550411f;
    e = e * r + 0.24022651f;
    e = e * r + 0.69314718f;
    e = e * r + 1.0f;
    const Words power = cast<Words>(shifted) - cast<uint32_t>(rounding);
    return cast<Floats>(cast<Words>(e) + (power << 23));
}

QUIRE_ALWAYS_INLINE Ints may_win(const float* x, Words ids, const RaceBounds& bounds) {
    Floats logits;
    std::memcpy(&logits, x, sizeof logits);
    const Floats zero{}, lowest = zero + float(Softmax::floor);
    const Floats d = (logits - bounds.max_logit) * bounds.inverse_temperature;
    const Floats below = d > zero ? zero : d;                   // an infinite logit is above max_logit
    const Floats distance = below > lowest ? below : lowest;    // false for NaN, which becomes the lowest
    const Words half = bounds.race.high_bits<Words>(ids) >> 1;  // as signed integers, which CPUs convert faster
    return __builtin_convertvector(cast<Ints>(half), Floats) <= fast_exp(distance) * bounds.scale + bounds.offset;
}

QUIRE_ALWAYS_INLINE bool any(Ints mask) {
    const Longs longs = cast<Longs>(mask);
    uint64_t all = 0;
    for (int lane = 0; lane < kBytes / 8; ++lane) all |= longs[lane];
    return all != 0;
}

}  // namespace

int64_t find_racers(const float* x, int64_t first, int64_t end, const RaceBounds& bounds, int32_t* ids) {
    const RaceBounds local = bounds;  // in registers
    Words lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = uint32_t(lane);
    int64_t count = 0, i = first;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
        Ints masks[4];
        for (int part = 0; part < 4; ++part)
            masks[part] = may_win(x + i + part * kLanes, lanes + uint32_t(i + part * kLanes), local);
        if (!any((masks[0] | masks[1]) | (masks[2] | masks[3]))) continue;
        for (int part = 0; part < 4; ++part)
            for (int lane = 0; lane < kLanes; ++lane)
                if (masks[part][lane]) ids[count++] = int32_t(i) + part * kLanes + lane;
    }
    for (; i < end; ++i) ids[count++] = int32_t(i);
    return count;
}

}  // namespace quire::QUIRE_ISA
