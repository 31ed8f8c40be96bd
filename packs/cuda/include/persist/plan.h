// Which records of a program run in one launch of the persistent decode kernel, and what that launch is told.
#pragma once
#include <vector>

#include "../../../host/program.h"
#include "phase.h"

namespace pk::persist {

// Records [first, last) as one launch.
struct Run {
    int64_t first = 0, last = 0;
    Sort sort = kEverything;
    Arguments arguments = {};
};

// The runs of a program for steps of at most `rows` rows of one token each. `memory` holds phases, packets and epochs.
struct Plan {
    int32_t rows = 0;
    std::vector<Run> runs;
    void *memory = nullptr;
    int64_t n_bytes = 0;
};

// Records [first, second) that another launch serves.
using Taken = std::vector<std::pair<int64_t, int64_t>>;

// Finds runs of at least min_phases phases outside `taken`; none where the device or the program is not this kernel's. PK_OOM, PK_DEVICE.
int32_t make_plan(const Launch &l, const Records &records, int32_t rows, int32_t min_phases, const Taken &taken, Plan *out);
void drop_plan(Plan &plan);
// The run that begins with record i of a launch, or null.
const Run *find_run(const std::vector<Plan> &plans, const Launch &l, int64_t i);
int32_t launch_run(const Launch &l, const Run &run);

}  // namespace pk::persist
