// Which steps have rows that begin with the same pages, as far as the host can tell.
#include <algorithm>

#include "../../include/share.h"

namespace pk {

void SharedRows::open(pk_ctx &ctx, const Records &records, const pk_state &state) {
    if (!can_share(state)) return;
    for (int64_t i = 0; i < records.n() && record_ < 0; ++i)
        if (records[i].op == PK_OP_ATTENTION && uses_share(&ctx, records[i].as<pk_op_attention>())) record_ = i;
    index_ = share_least() / state.page_tokens - 1;
    slots_ = slot_pages(&ctx, state);
    found_.reserve(state.max_step_rows);
}

void SharedRows::write(const Step &step) {
    if (record_ < 0) return;
    for (int32_t i = 0; i < step.head->n_pages; ++i)
        if (step.pages[i].index == index_ && step.pages[i].reserved != PK_PAGE_OF_POOL) slots_->shared[step.pages[i].slot] = step.pages[i].page;
}

bool SharedRows::any(const Step &step) {
    if (record_ < 0) return false;
    found_.clear();
    for (int32_t i = 0; i < step.head->n_rows; ++i)
        if (const int32_t page = slots_->shared[step.rows[i].slot]) found_.push_back(page);
    return has_twins();
}

bool SharedRows::has_twins() {
    std::sort(found_.begin(), found_.end());
    return std::adjacent_find(found_.begin(), found_.end()) != found_.end();
}

int32_t SharedRows::any_on_device(const pk_state &s, int32_t n_rows, bool *out) {
    *out = false;
    if (record_ < 0 || n_rows < 2) return PK_OK;
    std::vector<int32_t> slot(n_rows), page(s.n_slots);
    if (int32_t e = check(cudaMemcpy(slot.data(), reinterpret_cast<void *>(s.row_slot), n_rows * 4ll, cudaMemcpyDeviceToHost), "run")) return e;
    const int32_t *column = reinterpret_cast<const int32_t *>(s.page_table) + index_;
    if (int32_t e = check(cudaMemcpy2D(page.data(), 4, column, s.slot_pages * 4ll, 4, s.n_slots, cudaMemcpyDeviceToHost), "run")) return e;
    found_.clear();
    for (int32_t r : slot)
        if (r >= 0 && r < s.n_slots && page[r]) found_.push_back(page[r]);
    *out = has_twins();
    return PK_OK;
}

}  // namespace pk
