// Which records of a program serve a model's own guess alone (pk_op_guess in rare.h), and which steps run them.
#pragma once
#include "program.h"
#include "step.h"

namespace pk {

// Records [first, end); none: both are the number of records.
struct GuessPart {
    int64_t first, end;
};

GuessPart guess_part(const Records &records);

// Whether a step runs them: a row has several tokens or checks guesses.
bool runs_guess(const Step &step);

}  // namespace pk
