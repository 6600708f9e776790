// Binds the searches for scales and entries of grids (search.h). They run on the caller's thread, without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace {

using namespace quire;

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatVector = nb::ndarray<nb::numpy, float, nb::ndim<1>>;
using IntVector = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;

template <class Array, class T>
Array vector_of(std::unique_ptr<T[]> values, size_t count) {
    T* data = values.release();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Array(data, {count}, owner);
}

Groups checked(const Rows& x, const Rows& weights) {
    if (x.shape(0) != weights.shape(0) || x.shape(1) != weights.shape(1) || x.shape(1) < 1)
        throw nb::value_error("groups and weights have different shapes, or none");
    return {x.data(), weights.data(), int64_t(x.shape(0)), int64_t(x.shape(1)), nullptr};
}

void check_levels(int levels) {
    if (levels < 1 || levels > 1 << 16) throw nb::value_error("levels are not 1 .. 65536");
}

// search(groups with scratch, scales) for every group.
template <class Search>
FloatVector scales_of(Groups groups, const Search& search) {
    std::unique_ptr<float[]> scales(new float[size_t(groups.count)]);
    {
        nb::gil_scoped_release unlocked;
        std::vector<float> scratch(size_t(group_scratch(groups.size)));
        groups.scratch = scratch.data();
        search(groups, scales.get());
    }
    return vector_of<FloatVector>(std::move(scales), size_t(groups.count));
}

FloatVector symmetric(const Rows& x, const Rows& weights, const Floats& factors, int levels) {
    check_levels(levels);
    return scales_of(checked(x, weights), [&](const Groups& groups, float* scales) {
        kernels().search.symmetric(groups, factors.data(), int(factors.shape(0)), levels, scales);
    });
}

nb::tuple offset(const Rows& x, const Rows& weights, const Floats& factors, int levels, bool free) {
    check_levels(levels);
    std::unique_ptr<float[]> offsets(new float[x.shape(0)]);
    const FloatVector scales = scales_of(checked(x, weights), [&](const Groups& groups, float* to) {
        kernels().search.offset(groups, factors.data(), int(factors.shape(0)), levels, free, to, offsets.get());
    });
    return nb::make_tuple(scales, vector_of<FloatVector>(std::move(offsets), x.shape(0)));
}

FloatVector shrunk(const Rows& x, const Rows& weights, const Floats& widest, const Floats& zeros, const Floats& shrinks,
                   int levels) {
    check_levels(levels);
    if (widest.shape(0) != x.shape(0) || zeros.shape(0) != x.shape(0))
        throw nb::value_error("a scale and a zero point for each group are needed");
    return scales_of(checked(x, weights), [&](const Groups& groups, float* scales) {
        kernels().search.shrunk(groups, widest.data(), zeros.data(), shrinks.data(), int(shrinks.shape(0)), levels,
                                scales);
    });
}

FloatVector codebook(const Rows& x, const Rows& weights, const Floats& factors, const Floats& book) {
    if (book.shape(0) != 16) throw nb::value_error("a codebook has 16 entries");
    return scales_of(checked(x, weights), [&](const Groups& groups, float* scales) {
        kernels().search.codebook(groups, factors.data(), int(factors.shape(0)), book.data(), scales);
    });
}

IntVector nearest(const Rows& x, const Rows& weights, const Floats& values, const Halves& halves) {
    Groups groups = checked(x, weights);
    int64_t combinations = 1;
    for (int64_t digit = 0; digit < groups.size / 2; ++digit) combinations *= int64_t(values.shape(0));
    if (groups.size % 2 || groups.size > 16 || combinations > kMaxHalf || halves.shape(1) != 2)
        throw nb::value_error("vectors have two halves of at most 81 combinations of digits");
    for (size_t i = 0; i < halves.size(); ++i)
        if (halves.data()[i] >= combinations) throw nb::value_error("a half is no combination of digits");
    const DigitGrid grid{values.data(), halves.data(), int(values.shape(0)), int(halves.shape(0))};
    std::unique_ptr<int32_t[]> entries(new int32_t[size_t(groups.count)]);
    {
        nb::gil_scoped_release unlocked;
        std::vector<float> scratch(size_t(group_scratch(groups.size)));
        groups.scratch = scratch.data();
        kernels().search.nearest(groups, grid, entries.get());
    }
    return vector_of<IntVector>(std::move(entries), size_t(groups.count));
}

}  // namespace

void bind_search(nb::module_& m) {
    m.def("search_symmetric", &symmetric, nb::arg("x"), nb::arg("weights"), nb::arg("factors"), nb::arg("levels"),
          "Groups [count, size] -> scales [count]: x is about scale * q, q from -levels to levels - 1");
    m.def("search_offset", &offset, nb::arg("x"), nb::arg("weights"), nb::arg("factors"), nb::arg("levels"),
          nb::arg("free"), "Scales and offsets: x is about scale * q + offset, q from 0 to levels");
    m.def("search_shrunk", &shrunk, nb::arg("x"), nb::arg("weights"), nb::arg("widest"), nb::arg("zeros"),
          nb::arg("shrinks"), nb::arg("levels"), "Scales, fp16 numbers: x is about scale * (q - zero)");
    m.def("search_codebook", &codebook, nb::arg("x"), nb::arg("weights"), nb::arg("factors"), nb::arg("book"),
          "Scales: x is about scale * an entry of the codebook");
    m.def("nearest_in_grid", &nearest, nb::arg("x"), nb::arg("weights"), nb::arg("values"), nb::arg("halves"),
          "The entries [count] of a grid of digits that are nearest to the vectors x");
}
