// The kernels, one table for each ISA.
//
// Every file of native/kernels is compiled once for each instruction set, in `namespace quire::QUIRE_ISA`; the
// functions of the `plain` table, ordinary loops for the oldest CPU of the architecture, are the specification of the
// others. Sums are taken in one stated order, so that all tables and all batch sizes give the same bits wherever a
// comment says so.
//
// A function that works on many rows gets its thread's index and the number of threads, and does that thread's part of
// the work. It starts no threads, takes no locks and allocates nothing.
#pragma once

#include "compress.h"
#include "index.h"
#include "matrix.h"
#include "ops.h"
#include "scan.h"
#include "search.h"

namespace quire {

// References: a static initializer would copy tables with instructions that the CPU may not have.
struct Kernels {
    const char* name;
    const MatrixKernels& matrix;      // native/kernels/matrix.cpp
    const OpKernels& ops;             // native/kernels/ops.cpp
    const SearchKernels& search;      // native/kernels/search.cpp
    const ScanKernels& scan;          // native/kernels/scan.cpp
    const IndexKernels& index;        // native/kernels/index.cpp
    const CompressKernels& compress;  // native/kernels/compress.cpp
};

// The best table this CPU can run, or the one chosen with use_isa.
const Kernels& kernels();

// "plain", "dotprod", "i8mm", "avx2", "avxvnni" or "avx512". False if the CPU or the build lacks it. Must not be called
// while a tape runs.
bool use_isa(const char* name);

// The names that use_isa accepts here, best first. Ends with a null pointer.
const char* const* available_isas();

}  // namespace quire
