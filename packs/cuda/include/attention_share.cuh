// What share.cu finds out about a step's rows, and where the shared part of their attention lies.
#pragma once
#include "attention.cuh"

namespace pk {

constexpr int kShareLeast = 256;  // positions: a prefix below that is not worth a launch

struct ShareHead {
    int32_t n_groups, arrived;  // blocks of the comparison: zero between launches
    int32_t unused[14];
};
// Of a row: positions it shares (0: none), its first row of partial sums, rows from KV head to KV head, pieces.
struct ShareRow {
    int32_t tokens, part, stride, n_pieces;
};
// Of a group: its members' places, shared positions, pairs per KV head, how the positions are cut, first row of partial sums.
struct ShareGroup {
    int32_t first, count, tokens, pairs, length, n_pieces, part, unused;
};

struct Share {
    ShareHead *head = nullptr;
    ShareRow *rows = nullptr;
    ShareGroup *groups = nullptr;
    int2 *leaders = nullptr;  // of a row: the first row of its group or -1, and positions in common
    int32_t *members = nullptr;
};

Share share_of(const pk_state &s, uint8_t *memory);

}  // namespace pk
