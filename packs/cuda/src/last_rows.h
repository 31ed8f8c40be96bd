// The end of a step's last layer is for sampled rows alone: what other tokens leave there nobody reads.
#pragma once
#include "../../host/program.h"
#include "../include/context.h"

namespace pk {

// Records [first, end) of a program: the products behind the last attention, the gather behind them and the norm of what it gathers; and what serves in their place.
struct LastRows {
    int64_t first = -1, end = -1;
    Records gathers;   // attention's rows and the residual, for sampled rows
    Records products;  // of as many tokens as are sampled (StepInfo's second)
    Records norm;
};

// Finds them in the program of a step, if the last layer ends in two products with a norm between them and nobody else reads what they leave.
int32_t find_last_rows(const Records &records, const pk_state &state, LastRows *found);

// Whether they gain in such a launch.
inline bool has_few_last_rows(const LastRows &last, const Launch &l) { return last.first >= 0 && !l.decode_only && l.max_tokens > 128 && l.max_tokens >= 2 * l.max_samples; }

}  // namespace pk
