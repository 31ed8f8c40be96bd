// Sine and cosine of a rotation's angle.
#pragma once
#include "device.cuh"

namespace pk {

// By the units for them, once whole turns are taken off: to 1e-6 up to 2^22 radians. An eighth of the code of sincosf, which at a product's end comes from
// memory, behind the weights.
__device__ __forceinline__ void turn(float angle, float *sine, float *cosine) {
    const float turns = rintf(angle * 0.15915494f);
    const float rest = fmaf(-turns, -1.7484556e-7f, fmaf(-turns, 6.2831855f, angle));  // 2 pi in two parts
    *sine = __sinf(rest);
    *cosine = __cosf(rest);
}

}  // namespace pk
