// A choice of experts and their mixture, launched together (src/experts/experts.cu).
#pragma once
#include "experts.cuh"

namespace pk {

int32_t launch_route(const Launch &l, const pk_op_route &op);
// Of few tokens the choice and the sorting of its pairs are one launch.
int32_t launch_chosen_experts(const Launch &l, const pk_op_route &route, const pk_op_experts &op);

}  // namespace pk
