// The step input: layout and checks.
#include "step.h"

#include <algorithm>

#include "error.h"

namespace pk {
namespace {

using Long = long long;

int32_t check_counts(const pk_step_head &h, const pk_state &s) {
    struct Count {
        const char *name;
        int32_t n;
        int32_t max;
    };
    const Count counts[] = {
        {"n_tokens", h.n_tokens, s.max_step_tokens}, {"n_rows", h.n_rows, s.max_step_rows}, {"n_samples", h.n_samples, s.max_step_rows},
        {"n_new", h.n_new, s.n_slots},               {"n_pages", h.n_pages, INT32_MAX},     {"n_texts", h.n_texts, INT32_MAX},
        {"n_masks", h.n_masks, s.n_slots},           {"n_payload", h.n_payload, INT32_MAX},
    };
    for (const Count &c : counts)
        if (c.n < 0 || c.n > c.max) return fail(PK_BAD_ARG, "step %llu: %s is %d, it must be 0 to %d", (unsigned long long)h.seq, c.name, c.n, c.max);
    return PK_OK;
}

// [offset, offset + n) within [0, size)?
bool lies_in(int64_t offset, int64_t n, int64_t size) { return offset >= 0 && n >= 0 && offset + n <= size; }

int32_t check_slot(const char *what, int32_t i, int32_t slot, const pk_state &s) {
    if (slot >= 0 && slot < s.n_slots) return PK_OK;
    return fail(PK_BAD_ARG, "step: %s %d names slot %d of %d", what, i, slot, s.n_slots);
}

int32_t check_rows(Step &in, const pk_state &s) {
    int64_t tokens = 0;
    int32_t samples = 0, results = 0;
    bool drafts = false;
    for (int32_t i = 0; i < in.head->n_rows; ++i) {
        const pk_row &row = in.rows[i];
        if (int32_t status = check_slot("row", i, row.slot, s)) return status;
        if (row.n_tokens < 1 || row.n_tokens > s.max_step_tokens)
            return fail(PK_BAD_ARG, "step: row %d has %d tokens, it must be 1 to %d", i, row.n_tokens, s.max_step_tokens);
        tokens += row.n_tokens;
        bool is_draft = row.flags & PK_ROW_DRAFT;
        if ((row.flags & PK_ROW_SCORE) && !is_draft) return fail(PK_BAD_ARG, "step: row %d rates tokens and is no draft row (flags %d)", i, row.flags);
        if (is_draft && !(row.flags & PK_ROW_SAMPLE)) return fail(PK_BAD_ARG, "step: row %d is a draft that draws nothing (flags %d)", i, row.flags);
        bool is_held = row.flags & PK_ROW_HELD;
        if (is_held && (!(row.flags & PK_ROW_SAMPLE) || (row.flags & PK_ROW_SCORE)))
            return fail(PK_BAD_ARG, "step: row %d waits for a mask and draws nothing (flags %d)", i, row.flags);
        in.n_held += is_held;
        if (drafts && !is_draft) return fail(PK_BAD_ARG, "step: row %d comes after a draft row and is none", i);
        drafts = is_draft;
        samples += is_draft ? row.n_tokens : row.flags & PK_ROW_SAMPLE ? 1 : 0;
        results += is_draft ? row.n_tokens : 1;
    }
    if (tokens != in.head->n_tokens) return fail(PK_BAD_ARG, "step: the rows have %lld tokens, n_tokens is %d", (Long)tokens, in.head->n_tokens);
    if (results > s.max_step_rows) return fail(PK_BAD_ARG, "step: the rows have %d results of at most %d", results, s.max_step_rows);
    if (samples != in.head->n_samples) return fail(PK_BAD_ARG, "step: %d tokens are drawn, n_samples is %d", samples, in.head->n_samples);
    return PK_OK;
}

int32_t check_news(const Step &in, const pk_state &s) {
    for (int32_t i = 0; i < in.head->n_new; ++i) {
        const pk_new_slot &slot = in.news[i];
        const pk_sampling &p = slot.sampling;
        if (int32_t status = check_slot("new slot", i, slot.slot, s)) return status;
        if (slot.length < 0 || slot.length > s.max_ctx_tokens)
            return fail(PK_BAD_ARG, "step: new slot %d has length %d of at most %d", i, slot.length, s.max_ctx_tokens);
        if (p.n_bias < 0 || p.n_bias > s.max_bias) return fail(PK_BAD_ARG, "step: new slot %d has %d bias entries of at most %d", i, p.n_bias, s.max_bias);
        if (!lies_in(slot.bias_offset, 2 * (int64_t)p.n_bias, in.head->n_payload) && p.n_bias > 0)
            return fail(PK_BAD_ARG, "step: new slot %d's bias lies at payload %d, which has %d words", i, slot.bias_offset, in.head->n_payload);
        for (int32_t b = 0; b < p.n_bias; ++b) {
            int32_t token = in.payload[slot.bias_offset + 2 * b];
            if (token < 0 || token >= s.n_vocab) return fail(PK_BAD_ARG, "step: new slot %d biases token %d of %d", i, token, s.n_vocab);
        }
        if (p.n_stop < 0 || p.n_stop > 17) return fail(PK_BAD_ARG, "step: new slot %d has %d stop tokens of at most 17", i, p.n_stop);
        if (p.n_logprobs > s.max_top) return fail(PK_BAD_ARG, "step: new slot %d wants %d log-probabilities of at most %d", i, p.n_logprobs, s.max_top);
    }
    return PK_OK;
}

int32_t check_writes(const Step &in, const pk_state &s) {
    for (int32_t i = 0; i < in.head->n_pages; ++i) {
        const pk_page_write &w = in.pages[i];
        if (int32_t status = check_slot("page write", i, w.slot, s)) return status;
        if (w.index < 0 || w.index >= s.slot_pages) return fail(PK_BAD_ARG, "step: page write %d has index %d of %d", i, w.index, s.slot_pages);
        if (w.page < 0) return fail(PK_BAD_ARG, "step: page write %d names page %d", i, w.page);
        if (w.reserved < 0 || w.reserved > PK_PAGE_OF_POOL) return fail(PK_BAD_ARG, "step: page write %d is for table %d, there are 0 and 1", i, w.reserved);
    }
    for (int32_t i = 0; i < in.head->n_texts; ++i) {
        const pk_text &t = in.texts[i];
        if (int32_t status = check_slot("text", i, t.slot, s)) return status;
        if (!lies_in(t.position, t.n, (int64_t)s.max_ctx_tokens + 1))
            return fail(PK_BAD_ARG, "step: text %d ends at position %lld of %d", i, (Long)t.position + t.n, s.max_ctx_tokens + 1);
        if (!lies_in(t.offset, t.n, in.head->n_payload))
            return fail(PK_BAD_ARG, "step: text %d ends at payload %lld of %d", i, (Long)t.offset + t.n, in.head->n_payload);
    }
    int32_t mask_words = (s.n_vocab + 31) / 32;
    for (int32_t i = 0; i < in.head->n_masks; ++i) {
        const pk_mask_write &m = in.masks[i];
        if (int32_t status = check_slot("mask", i, m.slot, s)) return status;
        if (!lies_in(m.offset, mask_words, in.head->n_payload))
            return fail(PK_BAD_ARG, "step: mask %d ends at payload %lld of %d", i, (Long)m.offset + mask_words, in.head->n_payload);
    }
    return PK_OK;
}

}  // namespace

int64_t step_bytes(const pk_step_head &h) {
    return (int64_t)sizeof h + (int64_t)h.n_new * sizeof(pk_new_slot) + (int64_t)h.n_rows * sizeof(pk_row) +
           (int64_t)h.n_pages * sizeof(pk_page_write) + (int64_t)h.n_texts * sizeof(pk_text) + (int64_t)h.n_masks * sizeof(pk_mask_write) +
           (int64_t)h.n_payload * 4;
}

int64_t finish_bytes(const pk_state &state, int32_t n_masks) {
    return (int64_t)sizeof(pk_finish_head) + (int64_t)n_masks * 4 * (1 + ((int64_t)state.n_vocab + 31) / 32);
}

int32_t max_masks(const pk_state &state) { return std::max(state.n_slots, state.max_step_rows); }

int32_t read_finish(const pk_finish_head *input, const pk_state &state, uint64_t seq, Finish *out) {
    if (!input || reinterpret_cast<uintptr_t>(input) % 8) return fail(PK_BAD_ARG, "finish: the input must lie at a multiple of 8 bytes");
    if (seq == 0) return fail(PK_BAD_ARG, "finish: step %llu has not been begun, or is finished", (unsigned long long)input->seq);
    if (input->seq != seq) return fail(PK_BAD_ARG, "finish: step %llu is to be finished, not %llu", (unsigned long long)seq, (unsigned long long)input->seq);
    if (input->n_masks < 0 || input->n_masks > max_masks(state)) return fail(PK_BAD_ARG, "finish: n_masks is %d, it must be 0 to %d", input->n_masks, max_masks(state));
    out->head = input;
    out->slots = reinterpret_cast<const int32_t *>(input + 1);
    out->words = reinterpret_cast<const uint32_t *>(out->slots + input->n_masks);
    for (int32_t i = 0; i < input->n_masks; ++i)
        if (int32_t status = check_slot("mask", i, out->slots[i], state)) return status;
    return PK_OK;
}

int32_t read_step(const pk_step_head *input, const pk_state &state, Step *out) {
    if (!input || reinterpret_cast<uintptr_t>(input) % 8) return fail(PK_BAD_ARG, "step: the input must lie at a multiple of 8 bytes");
    if (int32_t status = check_counts(*input, state)) return status;
    out->head = input;
    out->news = reinterpret_cast<const pk_new_slot *>(input + 1);
    out->rows = reinterpret_cast<const pk_row *>(out->news + input->n_new);
    out->pages = reinterpret_cast<const pk_page_write *>(out->rows + input->n_rows);
    out->texts = reinterpret_cast<const pk_text *>(out->pages + input->n_pages);
    out->masks = reinterpret_cast<const pk_mask_write *>(out->texts + input->n_texts);
    out->payload = reinterpret_cast<const int32_t *>(out->masks + input->n_masks);
    if (int32_t status = check_rows(*out, state)) return status;
    if (int32_t status = check_news(*out, state)) return status;
    return check_writes(*out, state);
}

}  // namespace pk
