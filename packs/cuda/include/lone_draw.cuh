// The end of a step of one row: sampling and commit in one launch.
#pragma once
#include "context.h"

namespace pk {

int32_t launch_lone_draw(const Launch &l, const pk_op_sample &op);

}  // namespace pk
