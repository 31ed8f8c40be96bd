// Prepare and commit: the step's input goes into the state, rows are laid out, and results come out.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "ops.h"

namespace pk {
namespace {

void apply_news(const Run &run) {
    const pk_state &s = run.state;
    for (int32_t i = 0; i < run.step->head->n_new; ++i) {
        const pk_new_slot &slot = run.step->news[i];
        numbers<pk_sampling>(s.sampling)[slot.slot] = slot.sampling;
        numbers<int32_t>(s.length)[slot.slot] = slot.length;
        numbers<int32_t>(s.alive)[slot.slot] = 1;
        if (slot.sampling.n_bias > 0)
            std::memcpy(numbers<pk_bias>(s.bias) + int64_t{slot.slot} * s.max_bias, run.step->payload + slot.bias_offset,
                        slot.sampling.n_bias * sizeof(pk_bias));
    }
}

void apply_writes(const Run &run) {
    const pk_state &s = run.state;
    const Step &in = *run.step;
    for (int32_t i = 0; i < in.head->n_pages; ++i)
        if (const uint64_t table = in.pages[i].reserved == PK_PAGE_OF_POOL ? run.pool.page_table : s.page_table)
            numbers<int32_t>(table)[int64_t{in.pages[i].slot} * s.slot_pages + in.pages[i].index] = in.pages[i].page;
    for (int32_t i = 0; i < in.head->n_texts; ++i) {
        const pk_text &t = in.texts[i];
        std::memcpy(numbers<int32_t>(s.tokens) + t.slot * (int64_t{s.max_ctx_tokens} + 1) + t.position, in.payload + t.offset, t.n * sizeof(int32_t));
    }
    int64_t words = (s.n_vocab + 31) / 32;
    for (int32_t i = 0; i < in.head->n_masks; ++i)
        std::memcpy(numbers<uint32_t>(s.mask) + in.masks[i].slot * words, in.payload + in.masks[i].offset, words * sizeof(uint32_t));
}

// Fills the arrays of row `r` (its first token is number `start` of the step) and of its tokens.
void lay_row(const Run &run, int32_t r, int32_t slot, int32_t start, int32_t n, int32_t flags, bool is_alive) {
    const pk_state &s = run.state;
    int32_t position = is_alive ? numbers<int32_t>(s.length)[slot] : 0;
    numbers<int32_t>(s.row_slot)[r] = slot;
    numbers<int32_t>(s.row_start)[r] = start;
    numbers<int32_t>(s.row_position)[r] = position;
    numbers<int32_t>(s.row_flags)[r] = flags | (is_alive ? 0 : PK_ROW_DEAD);
    const int32_t *tokens = numbers<int32_t>(s.tokens) + slot * (int64_t{s.max_ctx_tokens} + 1) + position;
    const int32_t *pages = numbers<int32_t>(s.page_table) + int64_t{slot} * s.slot_pages;
    const int32_t *pool_pages = run.pool.kv ? numbers<int32_t>(run.pool.page_table) + int64_t{slot} * s.slot_pages : nullptr;
    for (int32_t i = 0; i < n; ++i) {
        int32_t token = is_alive ? tokens[i] : 0;
        numbers<int32_t>(s.token_id)[start + i] = token < 0 || token >= s.n_vocab ? 0 : token;
        numbers<int32_t>(s.token_position)[start + i] = is_alive ? position + i : 0;
        numbers<int32_t>(s.token_row)[start + i] = r;
        numbers<int32_t>(s.token_page)[start + i] = is_alive ? pages[(position + i) / s.page_tokens] : 0;
        if (pool_pages) numbers<int32_t>(run.pool.token_page)[start + i] = is_alive ? pool_pages[(position + i) / s.page_tokens] : 0;
    }
}

// Which tokens of the step the draws of row `r` follow.
void lay_draws(const Run &run, int32_t r, int32_t start, int32_t n, int32_t flags, int32_t &sample) {
    if (!(flags & PK_ROW_SAMPLE)) return;
    for (int32_t i = flags & PK_ROW_DRAFT ? 0 : n - 1; i < n; ++i) {
        numbers<int32_t>(run.state.sample_row)[sample] = r;
        numbers<int32_t>(run.state.sample_at)[sample++] = start + i;
    }
}

// The token of draw `at` goes into the slot, which has `length` tokens before it.
pk_result take_draw(const pk_state &s, int32_t slot, int32_t length, int32_t at, bool is_scored = false) {
    int32_t token = numbers<int32_t>(s.sample_token)[at], drawn = numbers<int32_t>(s.sample_flags)[at];
    if (drawn & PK_ROW_NAN) {
        numbers<int32_t>(s.alive)[slot] = 0;
        return {slot, -1, PK_ROW_NAN, length, 0, 0};
    }
    if (is_scored) return {slot, token, PK_ROW_SCORE, length + 1, numbers<float>(s.sample_logprob)[at], drawn >> 16};
    numbers<int32_t>(s.tokens)[slot * (int64_t{s.max_ctx_tokens} + 1) + length] = token;
    const pk_sampling &p = numbers<pk_sampling>(s.sampling)[slot];
    int32_t out = 0;
    for (int32_t i = 0; i < p.n_stop; ++i)
        if (p.stop[i] == token) out |= PK_ROW_STOP;
    if (length + 1 >= p.max_length || length + 1 > s.max_ctx_tokens) out |= PK_ROW_LENGTH;
    if (out) numbers<int32_t>(s.alive)[slot] = 0;
    return {slot, token, out, length + 1, numbers<float>(s.sample_logprob)[at], drawn >> 16};
}

// A row of guesses: one result per token, until what is drawn is not what was guessed, or there is no mask to draw under. In a score row all are taken.
pk_result *finish_draft(const Run &run, int32_t r, int32_t &sample, pk_result *out) {
    const pk_state &s = run.state;
    int32_t slot = numbers<int32_t>(s.row_slot)[r], n = numbers<int32_t>(s.row_start)[r + 1] - numbers<int32_t>(s.row_start)[r];
    int32_t &length = numbers<int32_t>(s.length)[slot];
    const int32_t *tokens = numbers<int32_t>(s.tokens) + slot * (int64_t{s.max_ctx_tokens} + 1);
    bool is_dead = numbers<int32_t>(s.row_flags)[r] & PK_ROW_DEAD, goes_on = !is_dead;
    bool is_scored = numbers<int32_t>(s.row_flags)[r] & PK_ROW_SCORE;
    int32_t n_draws = numbers<int32_t>(s.row_flags)[r] & PK_ROW_HELD ? numbers<int32_t>(s.row_flags)[r] >> kMaskedAt : n;
    for (int32_t i = 0; i < n; ++i, ++out) {
        *out = {slot, -1, is_dead ? PK_ROW_DEAD : 0, length, 0, 0};
        if (!goes_on || i >= n_draws) continue;
        int32_t guess = i + 1 < n ? tokens[length + 1] : -1;
        *out = take_draw(s, slot, ++length, sample + i, is_scored);
        if (!is_scored) out->n_top = 0;
        goes_on = is_scored ? !(out->flags & PK_ROW_NAN) : !out->flags && out->token == guess;
    }
    sample += n;
    return out;
}

pk_result finish_row(const Run &run, int32_t r, int32_t &sample) {
    const pk_state &s = run.state;
    int32_t slot = numbers<int32_t>(s.row_slot)[r], flags = numbers<int32_t>(s.row_flags)[r];
    int32_t &length = numbers<int32_t>(s.length)[slot];
    int32_t at = flags & PK_ROW_SAMPLE ? sample++ : -1;
    if (flags & PK_ROW_DEAD) return {slot, -1, PK_ROW_DEAD, length, 0, 0};
    length += numbers<int32_t>(s.row_start)[r + 1] - numbers<int32_t>(s.row_start)[r];
    if (at < 0) return {slot, -1, 0, length, 0, 0};
    return take_draw(s, slot, length, at);
}

}  // namespace

int32_t run_prepare(Run &run) {
    const pk_state &s = run.state;
    apply_news(run);
    apply_writes(run);
    const int32_t *length = numbers<int32_t>(s.length), *alive = numbers<int32_t>(s.alive);
    int32_t start = 0, sample = 0;
    for (int32_t r = 0; r < run.step->head->n_rows; ++r) {
        const pk_row &row = run.step->rows[r];
        bool is_alive = alive[row.slot] != 0;
        if (is_alive && (length[row.slot] < 0 || length[row.slot] + row.n_tokens > s.max_ctx_tokens))
            return fail(PK_BAD_ARG, "step %llu: row %d ends at position %lld of slot %d, the context has %d", (unsigned long long)run.step->head->seq, r,
                        (long long)length[row.slot] + row.n_tokens, row.slot, s.max_ctx_tokens);
        lay_row(run, r, row.slot, start, row.n_tokens, row.flags & (PK_ROW_SAMPLE | PK_ROW_DRAFT | PK_ROW_SCORE | PK_ROW_HELD), is_alive);
        lay_draws(run, r, start, row.n_tokens, row.flags, sample);
        start += row.n_tokens;
    }
    numbers<int32_t>(s.row_start)[run.step->head->n_rows] = start;
    return PK_OK;
}

void prepare_dead_rows(Run &run) {
    const pk_state &s = run.state;
    int64_t n_rows = run.n_samples > 0 ? run.n_samples : 1;
    if (n_rows > run.n_tokens) n_rows = run.n_tokens;
    int32_t start = 0;
    for (int32_t r = 0; r < n_rows; ++r) {
        int32_t n = static_cast<int32_t>(run.n_tokens * (r + 1) / n_rows) - start;
        lay_row(run, r, r % s.n_slots, start, n, run.n_samples ? PK_ROW_SAMPLE : 0, false);
        start += n;
    }
    numbers<int32_t>(s.row_start)[n_rows] = start;
    for (int32_t i = 0; i < run.n_samples; ++i) {
        int32_t r = i < n_rows ? i : 0;
        numbers<int32_t>(s.sample_row)[i] = r;
        numbers<int32_t>(s.sample_at)[i] = numbers<int32_t>(s.row_start)[r + 1] - 1;
    }
    run.n_rows = n_rows;
}

void apply_masks(const pk_state &s, const Finish &in, int64_t n_rows) {
    const int64_t words = (int64_t{s.n_vocab} + 31) / 32;
    const int32_t *start = numbers<int32_t>(s.row_start);
    int64_t sample = 0;
    for (int64_t r = 0; r < n_rows; ++r) {
        int32_t &flags = numbers<int32_t>(s.row_flags)[r];
        const int32_t slot = numbers<int32_t>(s.row_slot)[r], n = start[r + 1] - start[r];
        const int64_t first = sample;
        sample += flags & PK_ROW_DRAFT ? n : flags & PK_ROW_SAMPLE ? 1 : 0;
        if (!(flags & PK_ROW_HELD)) continue;
        const int32_t *end = in.slots + in.head->n_masks, *found = std::find(in.slots, end, slot);
        if (found == end) {
            flags |= PK_ROW_DEAD;
            continue;
        }
        int64_t to = slot, n_masks = 1;
        if (flags & PK_ROW_DRAFT) {
            to = s.n_slots + first;
            n_masks = std::find_if(found, std::min(end, found + n), [&](int32_t other) { return other != slot; }) - found;
            flags |= static_cast<int32_t>(n_masks) << kMaskedAt;
        }
        std::memcpy(numbers<uint32_t>(s.mask) + to * words, in.words + (found - in.slots) * words, n_masks * words * sizeof(uint32_t));
    }
}

void run_commit(Run &run) {
    const pk_state &s = run.state;
    uint64_t seq = run.step->head->seq;
    pk_result *results = numbers<pk_result>(s.results) + static_cast<int64_t>(seq % s.n_results) * s.max_step_rows;
    int32_t sample = 0;
    for (int32_t r = 0; r < run.n_rows; ++r) {
        if (numbers<int32_t>(s.row_flags)[r] & PK_ROW_DRAFT) results = finish_draft(run, r, sample, results);
        else *results++ = finish_row(run, r, sample);
    }
    std::atomic_ref<uint64_t>(*numbers<uint64_t>(s.done)).store(seq, std::memory_order_release);
}

}  // namespace pk
