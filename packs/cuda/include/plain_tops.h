// What a product of logits leaves for draws that take the largest (plain_rows.cuh).
#pragma once
#include <cstdint>

namespace pk {

// The largest logit of a row in a tile of columns with its lowest index; a NaN when there is one.
struct Top {
    float largest;
    int32_t index;
};

// [draw][tile], in steps of least to most draws; so many tiles in steps of at most `few` draws, and of more. tops is null where logits are all that is left.
struct Tops {
    Top *tops = nullptr;
    int32_t least = 0, most = 0, few = 0, n_few = 0, n_many = 0, stride = 0;
};

}  // namespace pk
