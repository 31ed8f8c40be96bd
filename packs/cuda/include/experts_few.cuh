// Experts of few pairs on Hopper in one launch (src/experts/few.cu).
#pragma once
#include "experts.cuh"

namespace pk {

// Whether gate and up (p) and `down` (d) of that format, whose items have up to item_pairs pairs, are for it; and the launch.
// done: a number an item, zero before. n_places: matrices of a stack.
bool fits_expert_few(const Launch &l, const ExpertProduct &p, const ExpertProduct &d, int32_t format, int32_t item_pairs);
int32_t launch_expert_few(const Launch &l, const ExpertProduct &p, const ExpertProduct &d, int32_t *done, int32_t format, int32_t item_pairs, int32_t n_places);

}  // namespace pk
