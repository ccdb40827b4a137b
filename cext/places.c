/* Entries of a section in the receiver's slot: where each lies, its new bits, and what keyed sums change by.
 *
 * A section is the packed stream of some strided copies. Positions ascend, so the copies are walked along with
 * them; keys of a row are made again only where the row changes. */
#include "places.h"

#include <string.h>

#include "delta.h"
#include "keys.h"

#define AHEAD 32 /* places are found so many at a time, and their memory asked for, before any of it is touched */

typedef struct {
    int64_t element, row, column;
} place;

/* A run of the innermost axis: entries inside it need no division. */
typedef struct {
    uint32_t low, high;
    place at;
} place_run;

static place_run run_of(const place_entry *e, uint32_t inside)
{
    place_run run = {inside, inside + 1, {e->target, e->row, e->column}};
    uint32_t rest = inside;
    for (int64_t d = 0; d < e->ndim; d++) {
        uint32_t inner = (uint32_t)e->inner[d], whole = rest / inner;
        if (d == e->ndim - 1) { /* its first entry stands for all; the last axis has inner size 1 */
            run.low = inside - whole;
            run.high = e->ndim > 1 ? run.low + (uint32_t)e->inner[d - 1] : (uint32_t)-1;
            break;
        }
        rest -= whole * inner;
        run.at.element += (int64_t)whole * e->target_stride[d];
        run.at.row += (int64_t)whole * e->row_stride[d];
        run.at.column += (int64_t)whole * e->column_stride[d];
    }
    return run;
}

static inline place place_in(const place_entry *e, const place_run *run, uint32_t inside)
{
    int64_t along = (int64_t)inside - run->low, last = e->ndim - 1;
    if (last < 0)
        return run->at;
    place at = {run->at.element + along * e->target_stride[last], run->at.row + along * e->row_stride[last],
                run->at.column + along * e->column_stride[last]};
    return at;
}

/* Places of entries first..end of one copy. */
static void find_places(const place_entry *e, const uint32_t *positions, int64_t first, int64_t end, place_run *run,
                        place *found)
{
    for (int64_t i = first; i < end; i++) {
        uint32_t inside = (uint32_t)((int64_t)positions[i] - e->start);
        if (inside < run->low || inside >= run->high)
            *run = run_of(e, inside);
        found[i - first] = place_in(e, run, inside);
    }
}

static int64_t first_at(const uint32_t *positions, int64_t count, int64_t element)
{
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if ((int64_t)positions[middle] < element)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

typedef struct {
    const place_entry *entries;
    int64_t blocks, count;
    places_job job;
    int64_t refused;
} places_state;

#define WORD(T, v) ((uint32_t)(v) + (sizeof(T) == 8 ? (uint32_t)((uint64_t)(v) >> 32) * HIGH_WORD : 0u))

#define DEFINE_COPY(T)                                                                                         \
    static int64_t copy_##T(const place_entry *e, const places_job *j, int64_t i, int64_t end, uint32_t sums[2]) \
    {                                                                                                          \
        const T *codes = j->codes;                                                                             \
        T *memory = j->memory, *old_bits = j->old, *new_bits = j->new_out;                                     \
        int64_t row = -1, from = i;                                                                            \
        uint32_t row_key[2] = {0, 0};                                                                          \
        place_run run = {1, 0, {0, 0, 0}};                                                                     \
        place places[AHEAD];                                                                                   \
        for (; i < end; i++) {                                                                                 \
            if ((i - from) % AHEAD == 0) {                                                                     \
                int64_t to = i + AHEAD < end ? i + AHEAD : end;                                                \
                find_places(e, j->positions, i, to, &run, places);                                             \
                for (int64_t k = 0; memory != NULL && k < to - i; k++)                                         \
                    if (places[k].element >= 0 && places[k].element < j->elements)                             \
                        __builtin_prefetch(&memory[places[k].element], 1);                                     \
            }                                                                                                  \
            place at = places[(i - from) % AHEAD];                                                             \
            T old, new = codes[i];                                                                             \
            if (memory != NULL) {                                                                              \
                if (at.element < 0 || at.element >= j->elements)                                               \
                    return REFUSED_RANGE;                                                                      \
                old = memory[at.element];                                                                      \
                if (j->kind == VALUES_XOR)                                                                     \
                    new ^= old;                                                                                \
                else if (j->kind == VALUES_ULP)                                                                \
                    new = UNORDERED(T, (T)(ORDERED(T, old) + UNZIGZAG(T, new)));                               \
                memory[at.element] = new;                                                                      \
                j->index[i] = at.element;                                                                      \
                new_bits[i] = new;                                                                             \
            } else {                                                                                           \
                old = old_bits[i];                                                                             \
            }                                                                                                  \
            if (at.row != row) {                                                                               \
                row = at.row;                                                                                  \
                row_key[0] = key(row, row_seed[0]);                                                            \
                row_key[1] = key(row, row_seed[1]);                                                            \
            }                                                                                                  \
            uint32_t change = WORD(T, new) - WORD(T, old);                                                     \
            sums[0] += change * row_key[0] * key(at.column, column_seed[0]);                                   \
            sums[1] += change * row_key[1] * key(at.column, column_seed[1]);                                   \
        }                                                                                                      \
        return 0;                                                                                              \
    }

DEFINE_COPY(uint8_t)
DEFINE_COPY(uint16_t)
DEFINE_COPY(uint32_t)
DEFINE_COPY(uint64_t)

static int64_t one_copy(const place_entry *e, const places_job *j, int64_t first, int64_t end, uint32_t sums[2])
{
    switch (j->itemsize) {
    case 1:
        return copy_uint8_t(e, j, first, end, sums);
    case 2:
        return copy_uint16_t(e, j, first, end, sums);
    case 4:
        return copy_uint32_t(e, j, first, end, sums);
    default:
        return copy_uint64_t(e, j, first, end, sums);
    }
}

static void one_block(void *state, int64_t block)
{
    places_state *s = state;
    int64_t low = s->count * block / s->blocks, high = s->count * (block + 1) / s->blocks;
    if (low >= high)
        return;
    int64_t at = first_at(s->job.positions, s->job.count, s->entries[low].start);
    for (int64_t k = low; k < high; k++) {
        const place_entry *e = &s->entries[k];
        int64_t end = at;
        while (end < s->job.count && (int64_t)s->job.positions[end] < e->start + e->elements)
            end++;
        uint32_t sums[2] = {0, 0};
        int64_t refused = one_copy(e, &s->job, at, end, sums);
        if (refused < 0) {
            __atomic_store_n(&s->refused, refused, __ATOMIC_RELAXED);
            return;
        }
        __atomic_fetch_add(&s->job.sums[2 * e->group], sums[0], __ATOMIC_RELAXED);
        __atomic_fetch_add(&s->job.sums[2 * e->group + 1], sums[1], __ATOMIC_RELAXED);
        at = end;
    }
}

int64_t run_places(const place_entry *entries, int64_t count, const places_job *job, int threads)
{
    places_state state = {entries, count < 4 * threads ? count : 4 * threads, count, *job, 0};
    parallel_for(one_block, &state, state.blocks, threads);
    return state.refused;
}
