// The arithmetic, one table of it for each vector unit.
//
// Every file of native/kernels is compiled once for each instruction set, in `namespace quire::QUIRE_ISA`; the
// functions of the `plain` table, ordinary loops for the oldest CPU of the architecture, are the specification of the
// others. Sums are taken in one stated order, so that all tables and all batch sizes give the same bits wherever a
// comment says so.
//
// A function that works on many rows is told which of how many threads it is and does its part of the work: it starts
// no threads, takes no locks and allocates nothing.
#pragma once

#include "matrix.h"
#include "ops.h"

namespace quire {

// References: a copy would be made when the program starts, by instructions that the CPU may not have.
struct Kernels {
    const char* name;
    const MatrixKernels& matrix;  // native/kernels/matrix.cpp
    const OpKernels& ops;         // native/kernels/ops.cpp
};

// The best table this CPU can run, or the one chosen with use_isa.
const Kernels& kernels();

// "plain", "dotprod", "i8mm", "avx2", "avxvnni" or "avx512". False if the CPU or the build lacks it. Not while a tape
// runs.
bool use_isa(const char* name);

// The names use_isa would take here, best first; ends with a null pointer.
const char* const* available_isas();

}  // namespace quire
