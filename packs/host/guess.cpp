#include "guess.h"

#include "../rare.h"

namespace pk {

GuessPart guess_part(const Records &records) {
    for (int64_t i = 0; i < records.n(); ++i)
        if (records[i].op == PK_OP_GUESS) return {records[i].as<pk_op_guess>().first, i + 1};
    return {records.n(), records.n()};
}

bool runs_guess(const Step &step) {
    const pk_step_head &head = *step.head;
    return head.n_rows != head.n_tokens || (head.n_rows > 0 && (step.rows[head.n_rows - 1].flags & PK_ROW_DRAFT));  // draft rows come last
}

}  // namespace pk
