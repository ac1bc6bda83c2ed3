// Forward attention with mma.sync, for every GPU from Ampere on:  o = softmax(q kT) v,  lse = log(sum(exp(s))).
//
// A CTA owns TILE_M query rows of one head and walks the visible keys in tiles of TILE_N, from the last to the first.
// Its warps split the rows, so that no scores pass between warps; each holds WARP_ROWS rows of q and o in registers.
//
//              keys ->     tile                    k, v: a ring of STAGES tiles in smem, filled by cp.async and read
//            +-----------+-----------+             by every warp: with 32 rows a warp, each operand read from smem
//   warp 0   |     strip | strip     |             feeds two rows of mma blocks
//   warp 1   |     strip | strip     |             q: through smem into registers, once
//   ...      |           |           |             s, p, o: registers only
//            +-----------+-----------+
//
// The walk is software-pipelined within a warp, in strips of STRIP keys. A step works on three strips at once, so that
// the tensor cores do not wait for the exponentials:
//
//   tensor cores   o += p[i-1] v[i-1] .................   s[i+1] = q k[i+1]T .......   o += p[i] v[i] ...
//   other pipes    p[i] = 2^(s[i] - reference), sums of p[i] .................  vote   p[i+1] = ...
//
// The reference is a stale maximum (softmax.cuh), so nothing passes between lanes. The sums of p[i], needed anyway,
// tell whether a score was too large for it; hardly ever does the vote of the warp find one, and s[i] must be computed
// anew, the reference raised and o rescaled.
//
// Where rows see different keys, a warp joins the walk at the first tile that its own rows see.
//
// Shared memory (struct Smem): the ring. While the first tiles are on their way, q lies in the stages that are filled
// later; o is staged over the ring at the end. There is one barrier a tile, before its last strip: then all warps have
// left the tile before, whose stage is filled anew, and the tile after must have arrived.
#include "tile.cuh"
#include "score.cuh"
#include "softmax.cuh"

using namespace cfg;

constexpr int WARP_ROWS = TILE_M / (NUM_THREADS / 32);
constexpr int M_BLOCKS = WARP_ROWS / BLOCK, ROWS = M_BLOCKS * 2;       // 16-row blocks of a warp; rows of a lane
constexpr int D_BLOCKS = TILE_D / BLOCK, DV_BLOCKS = TILE_DV / BLOCK;  // 16-column blocks of q and k, of v and o
constexpr int KEY_BLOCKS = STRIP / BLOCK, STRIPS = TILE_N / STRIP;
constexpr int Q_RMEM = Q_BLOCKS < D_BLOCKS ? Q_BLOCKS : D_BLOCKS;      // column blocks of q kept in registers;
constexpr bool Q_STAYS = Q_RMEM < D_BLOCKS;                            // the others are read from smem in every step
constexpr bool OWN_RANGES = ROWS_DIFFER;                               // warps skip tiles that only other warps see
static_assert(STRIPS % 2 == 0, "s and p of consecutive strips alternate between two buffers");
static_assert(STAGES >= 3, "a tile is read, the next has arrived, another is on its way");

// Which query rows of which head this CTA computes. Heads are taken in sections whose k and v share the L2 cache; in a
// section the last query tiles come first, whose causal walk is longest, so that short ones fill the last wave.
struct Work { int m0, head, batch; };
__device__ __forceinline__ int uniform(int x) { return redux_or(x); }  // x, which is the same in all lanes
constexpr u32 SECTION_KEYS = (32 << 20) / ((TILE_D + TILE_DV) * sizeof(Element));
__device__ __forceinline__ Work decode_block(const Params& p) {
  const u32 num_heads = p.num_heads_q, num_m_blocks = p.num_m_blocks, heads = p.batch * num_heads;
  const u32 section_heads = min(max(SECTION_KEYS / max(u32(p.seqlen_k), 1u), 1u), heads);
  const u32 section = blockIdx.x / (section_heads * num_m_blocks);
  const u32 index = blockIdx.x - section * section_heads * num_m_blocks;
  const u32 first_head = section * section_heads, size = min(section_heads, heads - first_head);
  const u32 row = index / size, head = first_head + index - row * size, batch = head / num_heads;
  return {uniform((num_m_blocks - 1 - row) * TILE_M), uniform(head - batch * num_heads), uniform(batch)};
}

struct Stage {
  Element k[TILE_N * TILE_D];
  Element v[TILE_N * TILE_DV];
};
constexpr int Q_STAGES = (TILE_M * TILE_D * (int)sizeof(Element) + (int)sizeof(Stage) - 1) / (int)sizeof(Stage);
constexpr int EARLY_STAGES = Q_STAYS ? STAGES : Q_STAGES < STAGES ? STAGES - Q_STAGES : 1;  // not overlaid by q
constexpr int EARLY_TILES = EARLY_STAGES < STAGES ? EARLY_STAGES : STAGES - 1;              // requested along with q

struct Start {
  Stage early[EARLY_STAGES];
  Element q[TILE_M * TILE_D];
};
struct Smem {
  union {
    Stage ring[STAGES];
    Start start;
    Element o[TILE_M * TILE_DV];
  };
  alignas(128) Work work;  // kept here for the end, out of the registers
  int nonfinite_at[2];   // the latest even and odd position of a masked tile with inf or NaN in v
  bool replaced_values;    // whether the output needs add_nonfinite
};
static_assert(sizeof(Smem) == SMEM_BYTES, "tiles.py and Smem disagree");

using Scores = float[M_BLOCKS][KEY_BLOCKS * 2][4];   // accumulators: a warp's rows x STRIP keys
using Probabilities = u32[M_BLOCKS][KEY_BLOCKS][4];  // the same as A operands
using Rows = float[ROWS];
constexpr int SCORES_PER_BLOCK = KEY_BLOCKS * 8, SCORES = M_BLOCKS * SCORES_PER_BLOCK, PAIRS = SCORES / 2;  // of a lane

// A step is a sequence of units, each an ldmatrix of one operand block and its products: those of o, then those of s.
constexpr int O_UNITS = KEY_BLOCKS * DV_BLOCKS, UNITS = O_UNITS + KEY_BLOCKS * D_BLOCKS;
constexpr int pairs_due(int u) {  // how many pairs of probabilities are due before unit u, spread over the first ones
  const int due = u * PAIRS / O_UNITS;
  return due < PAIRS ? due : PAIRS;
}

enum NamedBarrier { TILE_BARRIER = 1 };  // NUM_THREADS threads, which with OWN_RANGES meet at it in different places

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_CTAS) fwd_sm80(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const u32 thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * WARP_ROWS;
  Own<VARLEN> own(params);
  const Params& p = own.p;
  Work work;
  if constexpr (VARLEN) {
    SequenceTile tile;
    if (!find_tile<BY_QUERIES, TILE_M, SECTION_KEYS>(own, params, blockIdx.x, p.num_heads_q, tile)) return;
    work = {uniform((tile.blocks - 1 - tile.block) * TILE_M), uniform(tile.head), uniform(tile.batch)};
  } else {
    work = decode_block(p);
  }
  const int kv_head = uniform(u32(work.head) / u32(p.qheads_per_kv));
  auto in_all_lanes = [](KeyWalk walk) {
    walk.end = uniform(walk.end), walk.range.full_end = uniform(walk.range.full_end);
    return walk;
  };
  const Head at = {work.batch, work.head};
  const KeyWalk range = in_all_lanes({p, at, work.m0});
  KeyWalk warp = range;  // what this warp sees of it
  if (OWN_RANGES) warp = in_all_lanes({p, at, work.m0 + uniform(warp_row), WARP_ROWS});
  const float scale = exponent_scale(p);

  u32 q_rmem[Q_RMEM > 0 ? Q_RMEM : 1][M_BLOCKS][4];
  float o_rmem[M_BLOCKS][DV_BLOCKS * 2][4] = {};
  Scores s_rmem[2];         // of this strip and of the next
  Probabilities p_rmem[2];  // of this strip and of the one before
  u32 operand[2][4];            // B operands of two n8 blocks: for this unit and for the next
  u32 q_block[2][M_BLOCKS][4];  // A operands: the column blocks of q that stay in smem
  RowSoftmax<ROWS> softmax;
#pragma unroll
  for (int r = 0; r < ROWS; r++) softmax.begin(r, row_start(p, {work.batch, work.head}), lane % 4 == 0);

  // The order of the work, which the compiler would otherwise choose: all products first and all exponentials after
  // them, operands loaded long before use, addresses computed before the loop and spilled in it. `zero` is 0, but the
  // compiler cannot know; so an address a | (x & zero), or a + (x & zero), is a, once x has been computed.
  const u32 zero = (u32)p.batch >> 31;
  u32 latest_p = 0;  // the latest pair of probabilities

  const Element* k_gmem = p.k + k_begin(p, work.batch, p.k_stride) + kv_head * p.k_stride[2];  // (seqlen_k, head_dim)
  const Element* v_gmem = p.v + k_begin(p, work.batch, p.v_stride) + kv_head * p.v_stride[2];  // (seqlen_k, head_dim_v)
  const u32 q_lane = lane_address<TILE_D, ROWS_FIRST>(smem.start.q, warp_row, lane);
  const u32 k_lane = lane_address<TILE_D, COLS_FIRST>(smem.ring[0].k, 0, lane);
  const u32 v_lane = lane_address<TILE_DV, ROWS_FIRST>(smem.ring[0].v, 0, lane);
  // Where a lane finds a strip of a tile; computed after x.
  auto strip_k = [&](int stage, int strip, u32 x) {
    return block_at<TILE_D>(k_lane + stage * (int)sizeof(Stage), strip * STRIP, 0) + (x & zero);
  };
  auto strip_v = [&](int stage, int strip, u32 x) {
    return block_at<TILE_DV>(v_lane + stage * (int)sizeof(Stage), strip * STRIP, 0) + (x & zero);
  };
  auto thread_after = [&](u32 x) { return thread + (x & zero); };
  auto before = [](int stage) { return stage > 0 ? stage - 1 : STAGES - 1; };
  auto after = [](int stage) { return stage + 1 < STAGES ? stage + 1 : 0; };
  auto lane_row = [](u32 thread, int r) -> int {  // a thread's row r in the tile
    return thread / 32 * WARP_ROWS + r / 2 * BLOCK + r % 2 * 8 + thread % 32 / 4;
  };

  auto load_q = [&] {
    const Element* q_gmem = p.q + q_begin(p, work.batch, p.q_stride) + work.head * p.q_stride[2] + work.m0 * p.q_stride[1];
    const GmemTile<const Element> q = {q_gmem, p.q_stride[1], p.q_stride[3], p.seqlen_q - work.m0, p.head_dim};
    load_tile<TILE_M, TILE_D, WIDE_Q, RAGGED_D, true, NUM_THREADS>(smem.start.q, q, thread);
  };
  // Requests a tile as one group of copies, an empty one past the last tile, so that groups can be counted.
  auto load_kv = [&](int position, int stage, u32 from) {
    if (position >= range.begin) {
      const int n0 = range.tile(position) * TILE_N, rows = p.seqlen_k - n0;
      const GmemTile<const Element> k = {k_gmem + n0 * p.k_stride[1], p.k_stride[1], p.k_stride[3], rows, p.head_dim};
      const GmemTile<const Element> v = {v_gmem + n0 * p.v_stride[1], p.v_stride[1], p.v_stride[3], rows, p.head_dim_v};
      load_tile<TILE_N, TILE_D, WIDE_K, RAGGED_D, true, NUM_THREADS>(smem.ring[stage].k, k, from);
      load_tile<TILE_N, TILE_DV, WIDE_V, RAGGED_D, true, NUM_THREADS>(smem.ring[stage].v, v, from);
    }
    cp_async_commit();
  };

  // Turns the products with the strip at n0 into scores.
  auto finish_scores = [&](Scores& s, int n0, bool masked) {
    const u32 from = thread_after(n0);
    const Scorer scorer(p, {work.batch, work.head}, work.m0 + lane_row(from, 0), n0 + from % 4 * 2);
    by_size(p, s, [&](auto size) {
#pragma unroll
      for (int i = 0; i < SCORES; i++) {
        const int m = i / SCORES_PER_BLOCK, n = i / 4 % (KEY_BLOCKS * 2), e = i % 4;
        s[m][n][e] = scorer.score(s[m][n][e], m * BLOCK + e / 2 * 8, n * 8 + e % 2, size);
      }
    });
    if (!masked) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int kv0 = n0 + from % 4 * 2;
      const VisibleKeys keys = visible_keys(p, work.m0 + lane_row(from, r), kv0, {work.batch, work.head});
#pragma unroll
      for (int i = 0; i < KEY_BLOCKS * 4; i++) {
        if (!keys.has(i / 2 * 8 + i % 2)) s[r / 2][i / 2][r % 2 * 2 + i % 2] = HIDDEN;
      }
    }
  };
  // Pairs [begin, end) of the lane's probabilities of a strip, against `origin`, and what they add up to.
  auto exponentiate = [&](const Scores& s, const Rows& origin, Probabilities& p, Rows& sum, int begin, int end) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      if (pair < begin || pair >= end) continue;
      const int n = pair / (M_BLOCKS * 4), m = pair / 4 % M_BLOCKS, i = pair % 4, r = m * 2 + i % 2;
      const float* x = &s[m][n * 2 + i / 2][i % 2 * 2];
      const float lo = ex2(fmaf(x[0], scale, -origin[r])), hi = ex2(fmaf(x[1], scale, -origin[r]));
      sum[r] = n == 0 && i < 2 ? lo + hi : sum[r] + lo + hi;
      p[m][n][i] = pack2<Element>(lo, hi);
      latest_p = p[m][n][i];
    }
  };
  // The same in the ordinary way: if the reference must be raised, it is, and what was accumulated is rescaled.
  auto exponentiate_checked = [&](const Scores& s, Probabilities& p, Rows& sum) {
    Rows lane_max, origin;
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      lane_max[r] = s[r / 2][0][r % 2 * 2];
#pragma unroll
      for (int i = 1; i < KEY_BLOCKS * 4; i++) lane_max[r] = fmaxf(lane_max[r], s[r / 2][i / 2][r % 2 * 2 + i % 2]);
      outgrown |= softmax.outgrown(r, lane_max[r], scale);
    }
    if (__any_sync(~0u, outgrown)) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float factor = softmax.raise(r, lane_max[r], scale);
#pragma unroll
        for (int i = 0; i < DV_BLOCKS * 4; i++) o_rmem[r / 2][i / 2][r % 2 * 2 + i % 2] *= factor;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) origin[r] = exponent_origin(softmax.reference[r]);
    exponentiate(s, origin, p, sum, 0, PAIRS);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) latest_p |= p[i / 4 % M_BLOCKS][i / (M_BLOCKS * 4)][i % 4];
  };

  // Drops what is to be dropped of a strip's probabilities, once their sums are taken.
  auto drop = [&](Probabilities& p_strip, int n0) {
    const Scorer scorer(p, {work.batch, work.head}, work.m0 + lane_row(thread, 0), n0 + thread % 4 * 2);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      const int n = pair / (M_BLOCKS * 4), m = pair / 4 % M_BLOCKS, i = pair % 4;
      p_strip[m][n][i] = scorer.kept(p_strip[m][n][i], m * BLOCK + i % 2 * 8, n * BLOCK + i / 2 * 8);
    }
  };
  auto clear = [](Scores& s) {
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i / SCORES_PER_BLOCK][i / 4 % (KEY_BLOCKS * 2)][i % 4] = 0;
  };
  // The operand of a unit, from v_strip for o or from k_strip for s.
  auto load_operand = [&](int u, u32 v_strip, u32 k_strip) {
    if (u < O_UNITS) {
      ldmatrix_x4_trans(operand[u % 2], block_at<TILE_DV>(v_strip, u / DV_BLOCKS * BLOCK, u % DV_BLOCKS * BLOCK));
      return;
    }
    const int d = (u - O_UNITS) / KEY_BLOCKS, n = (u - O_UNITS) % KEY_BLOCKS;
    ldmatrix_x4(operand[u % 2], block_at<TILE_D>(k_strip, n * BLOCK, d * BLOCK));
#pragma unroll
    for (int m = 0; m < M_BLOCKS; m++) {
      if (d >= Q_RMEM && n == 0) ldmatrix_x4(q_block[d % 2][m], block_at<TILE_D>(q_lane, m * BLOCK, d * BLOCK));
    }
  };
  auto multiply = [&](int u, const Probabilities& p, Scores& s) {
    const u32(&b)[4] = operand[u % 2];
#pragma unroll
    for (int i = 0; i < M_BLOCKS * 2; i++) {
      const int m = i / 2, half = i % 2;
      if (u < O_UNITS) {
        const int n = u / DV_BLOCKS, d = u % DV_BLOCKS;
        mma_m16n8k16<Element>(o_rmem[m][d * 2 + half], p[m][n], b[half * 2], b[half * 2 + 1]);
      } else {
        const int d = (u - O_UNITS) / KEY_BLOCKS, n = (u - O_UNITS) % KEY_BLOCKS;
        mma_m16n8k16<Element>(s[m][n * 2 + half], d < Q_RMEM ? q_rmem[d][m] : q_block[d % 2][m], b[half * 2],
                              b[half * 2 + 1]);
      }
    }
  };
  // Units [begin, end) of a step: o += p v for the strip before, at v_before, then s_next = q kT for the strip after,
  // at k_next. Operand 0 is loaded already, and so is `then` at the end: 0 for the next step, on v_strip, or -1 for
  // none. beside(u) is computed beside unit u.
  struct Operands { u32 v_before, v_strip, k_next; };
  auto run = [&](int begin, int end, int then, Operands from, const Probabilities& p, Scores& s_next, auto beside) {
    if (begin > 0) load_operand(begin, from.v_before, from.k_next | (latest_p & zero));
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      if (u < begin || u >= end) continue;
      const int next = u + 1 < end ? u + 1 : then;
      auto load_next = [&] {  // in turn after exponentials that were due, otherwise after the operand before this one
        const u32 turn = (pairs_due(u) > pairs_due(u - 1) ? latest_p : u > O_UNITS ? operand[next % 2][0] : 0) & zero;
        load_operand(next, (next > 0 ? from.v_before : from.v_strip) | turn, from.k_next | turn);
      };
      const bool same_buffer = next % 2 == u % 2;
      if (next >= 0 && !same_buffer) load_next();
      if (u == O_UNITS) clear(s_next);
      multiply(u, p, s_next);
      if (next >= 0 && same_buffer) load_next();
      beside(u);
    }
  };

  auto nothing = [](int) {};

  // All threads meet, with a tile that has arrived. A hidden key has no influence, but 0 * v would be NaN if its v is
  // inf or NaN. In masked tiles such values (there hardly ever are any) are replaced by 0 here, before anybody reads
  // them, and what visible ones do to the output is made good at the end.
  auto meet = [&](int position, int stage) {
    Element* v = smem.ring[stage].v;  // (TILE_N, TILE_DV)
    auto found = [&]() -> int& { return smem.nonfinite_at[position % 2]; };  // two tiles on, all have read it
    if (range.hides(position) && loaded_nonfinite<TILE_N, TILE_DV, NUM_THREADS>(v, thread)) found() = position;
    named_barrier_sync(TILE_BARRIER, NUM_THREADS);
    if (range.hides(position) && found() == position) {
      for (int i = thread; i < TILE_N * TILE_DV; i += NUM_THREADS) {
        if (nonfinite<Element>(v[i].bits)) v[i] = Element{0};
      }
      if (thread == 0) smem.replaced_values = true;
      named_barrier_sync(TILE_BARRIER, NUM_THREADS);
    }
  };
  // Each warp on its rows of o in smem: a visible inf or NaN in v makes its column of the row inf or NaN.
  auto add_nonfinite = [&] {
    __syncwarp();
    for (int i = lane; i < WARP_ROWS * TILE_DV; i += 32) {
      const int row = warp_row + i / TILE_DV, col = i % TILE_DV;
      if (col >= p.head_dim_v) continue;
      Element& o = smem.o[Swizzle<TILE_DV>::offset(row, col) / sizeof(Element)];
      float sum = to_real(o);
      for (int i = range.begin * TILE_N; i < range.keys(p); i++) {
        if (!range.hides(i / TILE_N)) continue;
        const int n = range.key(i);
        const Element value = v_gmem[n * p.v_stride[1] + col * p.v_stride[3]];
        if (nonfinite<Element>(value.bits) && visible(p, work.m0 + row, n, at)) sum += to_real(value);
      }
      o = Dtype<Element>::from_real(sum);
    }
  };

  // Makes the next tile usable, and requests another for the stage of the one before, which all warps have left.
  auto next_tile = [&](int position, int stage, u32 x) {
    cp_async_wait<STAGES - 3>();
    meet(position - 1, after(stage));
    load_kv(position - (STAGES - 1), before(stage), thread_after(x));
  };
  auto walk_tile = [&](int position, int stage) {
    if (OWN_RANGES && position >= warp.end) {
      if (position > range.begin) next_tile(position, stage, stage);
      return;
    }
    const bool masked = warp.hides(position);
    const int tile = range.tile(position);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
      const bool at_end = strip == STRIPS - 1;
      const bool first = strip == 0 && position == warp.end - 1, last = at_end && position == range.begin;
      const int n0 = tile * TILE_N + strip * STRIP;
      Scores &s = s_rmem[strip % 2], &s_next = s_rmem[(strip + 1) % 2];
      Probabilities &p_strip = p_rmem[strip % 2], &p_before = p_rmem[(strip + 1) % 2];
      const u32 now = __float_as_uint(s[0][0][0]);  // known from the step before
      const Operands from = {strip > 0 ? strip_v(stage, strip - 1, now) : strip_v(before(stage), STRIPS - 1, now),
                             strip_v(stage, strip, now),
                             at_end ? strip_k(after(stage), 0, now) : strip_k(stage, strip + 1, now)};
      const int after_step = strip == STRIPS - 2 ? -1 : 0;  // nothing is loaded ahead over the barrier
      Rows sum;
      auto in_the_ordinary_way = [&] {
        run(O_UNITS, UNITS, -1, {0, 0, strip_k(stage, strip, latest_p)}, p_before, s, nothing);
        finish_scores(s, n0, masked);
        exponentiate_checked(s, p_strip, sum);
      };
      auto exponentials = [&](int u) {
        exponentiate(s, softmax.reference, p_strip, sum, pairs_due(u), pairs_due(u + 1));
      };
      if (at_end && !last) next_tile(position, stage, now);
      if (at_end) load_operand(0, from.v_before, 0);
      if (first) {
        in_the_ordinary_way();
        run(O_UNITS, UNITS, after_step, from, p_before, s_next, nothing);
      } else {
        finish_scores(s, n0, masked);
        if (last) run(0, O_UNITS, 0, from, p_before, s_next, exponentials);
        else run(0, UNITS, after_step, from, p_before, s_next, exponentials);
        bool outgrown = false;  // or NaN
#pragma unroll
        for (int r = 0; r < ROWS; r++) outgrown |= !(sum[r] <= MAX_LANE_SUM);
        if (__builtin_expect(__any_sync(~0u, outgrown), 0)) {
          in_the_ordinary_way();
          if (after_step == 0) load_operand(0, from.v_strip, 0);
        }
      }
      drop(p_strip, n0);
#pragma unroll
      for (int r = 0; r < ROWS; r++) softmax.sum[r] += sum[r];
    }
  };

  if (thread == 0) {
    smem.work = work;
    smem.nonfinite_at[0] = smem.nonfinite_at[1] = -1;
    smem.replaced_values = false;
  }
  if (range.begin < range.end) {
    const int first = range.end - 1;
    load_q();
    for (int i = 0; i < EARLY_TILES; i++) load_kv(first - i, i, thread);
    __syncthreads();
    cp_async_wait<EARLY_TILES - 1>();
    meet(first, 0);
#pragma unroll
    for (int i = 0; i < Q_RMEM * M_BLOCKS; i++) {
      const int m = i % M_BLOCKS, d = i / M_BLOCKS;
      ldmatrix_x4(q_rmem[d][m], block_at<TILE_D>(q_lane, m * BLOCK, d * BLOCK));
    }
    if (EARLY_TILES < STAGES - 1) {
      __syncthreads();
      for (int i = EARLY_TILES; i < STAGES - 1; i++) load_kv(first - i, i, thread);
    }
    int stage = 0;
    for (int i = range.end - 1; i >= range.begin; i--, stage = after(stage)) walk_tile(i, stage);
    const Operands from = {strip_v(before(stage), STRIPS - 1, 0), 0, 0};
    if (!OWN_RANGES || range.begin < warp.end) run(0, O_UNITS, -1, from, p_rmem[1], s_rmem[0], nothing);
  }
  __syncthreads();  // o is about to overwrite the ring

  // Everything about the thread and its work anew, as none of it was kept.
  const u32 same_thread = thread + (__float_as_uint(softmax.sum[0]) & (u32)p.num_heads_q >> 31);
  const u32 same_lane = same_thread % 32, same_warp_row = same_thread / 32 * WARP_ROWS;
  const Work done = smem.work;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float inverse, lse;
    softmax.finish(r, inverse, lse);
    inverse *= kept_scale(p);
    const int row = done.m0 + lane_row(same_thread, r);
    if (p.lse && same_lane % 4 == 0 && row < p.seqlen_q) {
      p.lse[rows_begin(p, flat_head(p, done.batch, done.head)) + row] = lse;
    }
#pragma unroll
    for (int i = 0; i < DV_BLOCKS * 4; i++) o_rmem[r / 2][i / 2][r % 2 * 2 + i % 2] *= inverse;
  }
#pragma unroll
  for (int i = 0; i < M_BLOCKS * DV_BLOCKS * 2; i++) {
    const int m = i % M_BLOCKS, n = i / M_BLOCKS;
    store_accumulator<TILE_DV>(smem.o, same_warp_row + m * BLOCK, n * 8, o_rmem[m][n], same_lane);
  }
  if (smem.replaced_values) add_nonfinite();
  __syncwarp();
  const int row = done.m0 + same_warp_row;
  Element* o_gmem = p.o + q_begin(p, done.batch, p.o_stride) + done.head * p.o_stride[2] + row * p.o_stride[1];
  const GmemTile<Element> o = {o_gmem, p.o_stride[1], p.o_stride[3], p.seqlen_q - row, p.head_dim_v};
  store_tile<WARP_ROWS, TILE_DV, WIDE_O, RAGGED_D, 32>(o, smem.o + same_warp_row * TILE_DV, same_lane);
}
