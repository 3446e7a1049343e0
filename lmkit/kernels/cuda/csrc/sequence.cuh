// Which sequence a tile of query rows belongs to: of kernels whose blocks take tiles of a step's rows.
#pragma once
#include "ptx.cuh"

// The sequence that tile `slot` of all belongs to, where a tile has TILE rows of one sequence and a token has `group` rows.
// A sequence's tiles begin at (its first row) / TILE, and one later for each sequence before it unless tokens are whole
// tiles: there is room for all. `first`: the tile's first row, which may be after the sequence's last.
template <int TILE>
DEVICE int sequence_of(int slot, const i32* query_start, int sequences, int group, int& first) {
    const int spare = group % TILE != 0;
    int before = 0;
    for (int b = lane_id(); b - lane_id() < sequences; b += 32) {
        const bool begun = b < sequences && static_cast<i64>(query_start[b]) * group / TILE + b * spare <= slot;
        before += __popc(__ballot_sync(0xffffffffu, begun));
    }
    const int b = before - 1;
    first = (slot - static_cast<int>(static_cast<i64>(query_start[b]) * group / TILE) - b * spare) * TILE;
    return b;
}
