// Forward attention on Hopper with wgmma, TMA and warp specialisation:  o = softmax(q kT) v,  lse = log(sum(exp(s))).
//
// A CTA stays on its multiprocessor and takes output tiles of TILE_M query rows in turn. One thread of warpgroup 0, or
// of a single warp behind the others, loads; each other warpgroup computes 64 rows of the tile, walking the visible keys
// in tiles of TILE_N. Scores and output are accumulators in registers; the probabilities stay in registers too, as
// operand a of the second product. So nothing that is computed passes through shared memory, nor between warps, but o
// where it leaves by TMA.
//
//   warp roles                                                               keys ->   tile    tile    tile
//     warpgroup 0, thread 0    load     q, k, v by TMA, as far ahead                 +-------+-------+-------+
//                                       as the buffers reach, across     warpgroup 1 |       |       |       | 64 rows
//                                       output tiles                     warpgroup 2 |       |       |       | 64 rows
//     warpgroups 1..           compute  s = q kT, softmax, o += p v;     ...         +-------+-------+-------+
//                                       o and lse to global memory
//
//   pipeline: one step of a warpgroup, for key tile i of its walk, and what its neighbour does meanwhile
//     tensor cores     s[i] = q k[i]T | o += p[i-1] v[i-1] |    the neighbour's s[i], o    | s[i+1] ...
//     warpgroup 1      its turn       | pass the turn      | p[i] = 2^(s[i] * scale - reference), round | its turn
//     warpgroup 2      p, round                            | its turn       | pass it      | p, round
//   The turns ("ping-pong") keep one warpgroup's exponentials under the other's products. A warpgroup's own second
//   product lies beside its own exponentials too: it is one tile behind. Where walks are short or tiles take differently
//   long, as of windows and block masks, there are no turns.
//   SCORE_EARLY: the first scores of the next output tile are started beside the last product of this one, and o is
//   stored under them, where it can by TMA from the place of its q (STORES_TMA).
//
// The reference is a stale maximum (softmax.cuh): no maximum is looked for, and o is not rescaled. The sum of the new
// probabilities tells if a score was too large for that; then, rarely, the warp alone computes its scores anew
// (warp_products) and takes the ordinary step. Some features make that frequent, or dear, and look for the maximum (RAISES).
//
// A hidden key has no influence whatever its v holds, but 0 * v is NaN where v is inf or NaN, and then so is a column
// of o, in every row. So once an output tile, when its masked tiles have been multiplied, each lane looks through one
// of its rows of o; if not all is finite, the warp computes its part of o anew without hidden keys (redo_output).
//
// An output tile is usually of one head. Where heads have few queries it has rows of PACK heads that share k and v, and
// where there are few tiles and many keys there is one for each part of the keys (SPLIT), whose o and lse are left in
// float32 for combine.cu to merge:
//
//     rows of a warpgroup   | head 0: WG_QUERIES queries | head 1: the same queries | ...   (TMA loads them as one box)
//     keys of a query tile  | split 0                    | split 1                  | ...   (equally many key tiles)
//
// Shared memory (struct Smem): rings of Q_STAGES tiles of q, STAGES of k and V_STAGES of v, each buffer with a "full"
// mbarrier (bytes landed) and an "empty" one (an arrival from every warp that has read it). Rows of a bias that TMA can
// bring (ADDENDS_AHEAD) share the stages of k.
//
//   bias [STAGES][64 rows each] | q [Q_STAGES][64 rows each] | k [STAGES] | v [V_STAGES] | which output tile is next | mbarriers
#include "fwd_sm90_exact.cuh"
#include "fwd_sm90_load.cuh"
#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(cfg::NUM_THREADS, cfg::MIN_CTAS)
fwd_sm90(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);

  if (threadIdx.x == 0) {
    smem.init();
    mbarrier_init_fence();
  }
  if (WG_USED_ROWS < WG_ROWS) {
    u32* q_smem = reinterpret_cast<u32*>(smem.q);
    for (int i = threadIdx.x; i < (int)(sizeof(smem.q) / sizeof(u32)); i += cfg::NUM_THREADS) q_smem[i] = 0;
    fence_proxy_async_shared();
  }
  __syncthreads();

  if (warpgroup == LOADER) {
    if constexpr (SHARES_REGISTERS) setmaxnreg_dec<cfg::PRODUCER_REGS>();
    if (threadIdx.x == LOADER * WARPGROUP) produce(params, smem);
    return;
  }
  if constexpr (SHARES_REGISTERS) setmaxnreg_inc<cfg::CONSUMER_REGS>();
  const int wg = SHARES_REGISTERS ? warpgroup - 1 : warpgroup;
  const int lane = threadIdx.x % WARP, warp_row = threadIdx.x % WARPGROUP / WARP * 16;
  Own<VARLEN> own(params);
  const Params& p = own.p;
  const float scale = exponent_scale(p);

  float s_rmem[TILE_N / 2], o_rmem[TILE_DV / 2];  // accumulators (64, TILE_N) and (64, TILE_DV)
  u32 p_rmem[KEY_STEPS][4];                       // probabilities as operand a (64, TILE_N)
  TileSoftmax softmax;
  PackedRing<Q_STAGES> q;
  Ring<STAGES> k;
  Ring<V_STAGES> v;
  Work work;
  KeyWalk range;                // key tiles of this warpgroup's rows
  int before, behind;           // how many of the output tile's walk lie before them, and behind
  float slope[2];               // ALIBI: of the heads of the lane's rows
  bool tiny = true;             // MAY_BE_TINY: whether the warp's products of this output tile have all been
  RowFacts row_facts;           // MAY_BE_ALIKE
  bool unchecked = false;       // whether o has products of masked tiles that were not looked through

  // ---- The lane's two rows of an output tile
  const int lane_row = warp_row + lane / 4;
  auto query = [&](const Work& work, int r) {  // seqlen_q and more: there is none
    const int row = lane_row + r * 8;
    if (cfg::PACK == 1) return work.m0 + wg * WG_ROWS + row;
    return row < WG_USED_ROWS ? work.m0 + wg * WG_QUERIES + row % WG_QUERIES : p.seqlen_q;
  };
  auto head = [&](const Work& work, int r) {
    return cfg::PACK == 1 ? work.head : work.head + min((lane_row + r * 8) / WG_QUERIES, cfg::PACK - 1);
  };

  // The arguments of a tile's sequence, found anew rather than kept in registers; plain ones as they are.
  auto own_of = [&](const Work& work) {
    Own<VARLEN> found(params);
    if constexpr (VARLEN) enter_part<BY_QUERIES>(found, params, rows_part(params, work));
    return found;
  };

  auto find_range = [&](const Params& p, const Work& work, const KeyWalk& all) {
    return warpgroup_keys(p, all, {work.batch, work.head}, work.m0 + wg * WG_QUERIES);
  };

  // ---- The walk's tiles. What memory has of them is read a step ahead
  int entry = 0, next_entry = 0;
  auto tile = [&](int n) { return LISTS_TILES ? range.list.tile(n, entry) : range.tile(n); };
  auto hides = [&](int n) { return LISTS_TILES ? range.hides(tile(n), entry) : range.hides(n); };
  auto look_up = [&](int n) {
    entry = next_entry;
    if (n > range.begin) next_entry = range.list.entry(n - 1);
  };

  // ---- What lies in memory for each element, and is added to its score
  u32 addends[4], addends_place = 0, addends_at = 0;
  if constexpr (ADDENDS_AHEAD) addends_place = AddendTile::place(row_of_addends(p, warp_row + lane % 16), lane);
  auto addend = [&](int i) {  // of element i of the lane's, in rising order
    if constexpr (!ADDENDS_AHEAD) return 0.f;
    if constexpr (ADDENDS_AHEAD) {
      if (i % 8 == 0) AddendTile::read(addends, addends_at, i / 8);
    }
    const u32 pair = addends[i % 8 / 2];
    return to_real(Element{(unsigned short)(i % 2 ? pair >> 16 : pair)});
  };

  // ---- Handing over: output tiles, buffers, turns
  auto receive_work = [&]() {
    mbarrier_wait(&smem.q_full[q.index()][wg], q.parity());
    const Work next = smem.work[q.index()][wg];
    // All lanes have read before one of them releases it, with q. compute-sanitizer's racecheck does not follow this
    // order and reports these reads; it does not where lane 0, which releases, reads alone, but that spills registers.
    __syncwarp();
    work = {uniform(next.m0), uniform(next.head), uniform(next.batch), uniform(next.split)};
    if constexpr (VARLEN) {
      if (work.valid()) enter_part<BY_QUERIES>(own, params, rows_part(params, work));
    }
#pragma unroll
    for (int r = 0; r < 2; r++) slope[r] = slope_of(p, {work.batch, head(work, r)});
    const KeyWalk all = tile_keys(p, work);
    range = find_range(p, work, all);
    if constexpr (MAY_BE_ALIKE) row_facts = {p, {work.batch, work.head}, query(work, 0), query(work, 1)};
    before = all.end - range.end;
    behind = range.begin - all.begin;
    if (range.begin < range.end) {
      next_entry = range.list.entry(range.end - 1);
    }
  };
  auto release = [&](u64* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  auto release_k = [&](int n) {  // and q after the last, unless o is to have its place
    if (ADDENDS_AHEAD) __syncwarp();  // all lanes have read them
    release(&smem.k_empty[k.index]);
    if (!STORES_TMA && n == range.begin) release(&smem.q_empty[q.index()][wg]);
  };
  auto release_v = [&]() {
    __syncwarp();  // no lane still waits for it
    release(&smem.v_empty[v.index]);
    v.advance();
  };
  auto take_turn = [&]() {
    if (PING_PONG) named_barrier_sync(TURN + wg, TURN_THREADS);
  };
  auto pass_turn = [&]() {
    if (PING_PONG) named_barrier_arrive(TURN + (wg == CONSUMERS - 1 ? 0 : wg + 1), TURN_THREADS);
  };
  auto skip = [&](int tiles) {  // tiles that only other warpgroups need
    for (int i = 0; i < tiles; i++) {
      mbarrier_wait(&smem.k_full[k.index], k.parity);
      take_turn();
      pass_turn();
      __syncwarp();  // a lane that still waits would miss the phase when a release lets the ring go round
      release(&smem.k_empty[k.index]);
      k.advance();
      mbarrier_wait(&smem.v_full[v.index], v.parity);
      release_v();
    }
  };

  auto first_key = [&](int n) {  // of the lane's in a key tile
    const int key = tile(n) * TILE_N + lane % 4 * 2;
    // Nothing is made from it before the scores are there. What random bits are shared by the compiler knows to be 0.
    return BY_ELEMENT ? (int)opaque(key) & ~9 : key;
  };
  // ---- Which elements are hidden, loaded before their scores are there
  using Bits = QuadBits<TILE_N>;
  Bits seen[2];   // of the lane's rows
  u32 hidden[2];  // bits
  auto load_ahead = [&](int n) {
    const int kv0 = tile(n) * TILE_N;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int q_idx = query(work, r), keys = q_idx < p.seqlen_q ? p.seqlen_k - kv0 : 0;
      if constexpr (HIDDEN_AHEAD) seen[r].load(visible_row(p, {work.batch, head(work, r)}, q_idx) + kv0, keys, lane);
    }
  };
  auto look = [&](int n) {  // HIDES_ANYWHERE: which elements of a tile are hidden
    const int kv0 = first_key(n);
    const VisibleKeys keys[2] = {visible_keys(p, query(work, 0), kv0, {work.batch, head(work, 0)}),
                                 visible_keys(p, query(work, 1), kv0, {work.batch, head(work, 1)})};
#pragma unroll
    for (int r = 0; r < 2; r++) hidden[r] = HIDDEN_AHEAD ? ~seen[r].bits(lane) : 0;
    if (HIDDEN_AHEAD && all_by_position(keys)) return;
    note_hidden<Bits>(p, hidden, keys, {work.batch, work.head}, tile(n) * TILE_N, row_facts, lane);
  };
  // While products are on their way.
  auto prepare = [&](int n) {
    if constexpr (ADDENDS_AHEAD) addends_at = smem_u32(&smem.addends[k.index][wg]) + addends_place;
    if constexpr (HIDES_ANYWHERE) {
      if (hides(n)) look(n);
    }
  };

  // ---- Products
  auto multiply_scores = [&]() {  // s = q kT
    const u32 q_smem = smem_u32(smem.q[q.index()][wg]), k_smem = smem_u32(smem.k[k.index]);
    const u64 a = descriptor_k_major(q_smem, u32(p.seqlen_k) >> 31), b = descriptor_k_major(k_smem, k_smem >> 31);
    wgmma_ss<Element, TILE_N, false, false, false>(s_rmem, a, b);
#pragma unroll
    for (int i = 1; i < D_STEPS; i++) {
      const int chunk = i / 4, bytes = i % 4 * 32;
      wgmma_ss<Element, TILE_N, false, false, true>(s_rmem,
                                                    descriptor_at(a, chunk * sizeof(smem.q[0][0][0]) + bytes),
                                                    descriptor_at(b, chunk * sizeof(smem.k[0][0]) + bytes));
    }
    wgmma_commit();
  };
  auto multiply_values = [&]() {  // o += p v
    const u32 v_smem = smem_u32(smem.v[v.index]);
    const u64 b = descriptor_mn_major(v_smem, sizeof(smem.v[0][0]), v_smem >> 31);
#pragma unroll
    for (int i = 0; i < KEY_STEPS; i++) {
      wgmma_rs<Element, TILE_DV, true, true>(o_rmem, p_rmem[i], descriptor_at(b, i * 16 * CHUNK_ROW_BYTES));
    }
    wgmma_commit();
  };
  auto hold_output = [&]() {
    wgmma_hold(o_rmem);
    wgmma_hold(p_rmem);
  };
  auto start_scores = [&]() {  // alone
    mbarrier_wait(&smem.k_full[k.index], k.parity);
    take_turn();
    wgmma_fence();
    multiply_scores();
    pass_turn();
  };
  auto start_output = [&]() {  // alone
    mbarrier_wait(&smem.v_full[v.index], v.parity);
    hold_output();
    wgmma_fence();
    multiply_values();
  };
  // Scores of tile n and output of the one before; until the scores are there. v is waited for under the product of q and
  // k, as even to see that it is there takes time; behind a loop the assembler wants another fence.
  auto start_step = [&](int n) {
    load_ahead(n);
    mbarrier_wait(&smem.k_full[k.index], k.parity);
    take_turn();
    hold_output();
    wgmma_fence();
    multiply_scores();
    mbarrier_wait(&smem.v_full[v.index], v.parity);
    wgmma_fence();
    multiply_values();
    pass_turn();
    prepare(n);
    wgmma_wait<1>();
    wgmma_hold(s_rmem);
  };
  auto finish_output = [&]() {
    wgmma_wait<0>();
    hold_output();
    release_v();
  };

  // ---- Softmax
  auto modify = [&](int n) {
    const int kv0 = first_key(n);
    const Scorer scorers[2] = {{p, {work.batch, head(work, 0)}, query(work, 0), kv0, slope[0]},
                               {p, {work.batch, head(work, 1)}, query(work, 1), kv0, slope[1]}};
    by_size(p, s_rmem, [&](auto size) {
#pragma unroll
      for (int i = 0; i < TILE_N / 2; i++) {
        s_rmem[i] = scorers[i / 2 % 2].score(s_rmem[i], 0, i / 4 * 8 + i % 2, size.template with<false>(addend(i)));
      }
    });
  };
  auto hide = [&](int n) {
    if constexpr (HIDES_ANYWHERE) {
#pragma unroll
      for (int i = 0; i < TILE_N / 2; i++) {
        if (hidden[i / 2 % 2] >> Bits::place(i / 4, i % 2) & 1) s_rmem[i] = HIDDEN;
      }
    } else {
      const int kv0 = first_key(n);
      const int queries[2] = {query(work, 0), query(work, 1)};
      const VisibleKeys keys[2] = {visible_keys(p, queries[0], kv0, {work.batch, head(work, 0)}),
                                   visible_keys(p, queries[1], kv0, {work.batch, head(work, 1)})};
      if (!BOUND_LEFT || range.ends(tile(n))) {
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++) {
          if (!keys[i / 2 % 2].last.has(i / 4 * 8 + i % 2)) s_rmem[i] = HIDDEN;
        }
      }
      if (BOUND_LEFT && range.begins(tile(n))) {
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++) {
          if (!keys[i / 2 % 2].first.has(i / 4 * 8 + i % 2)) s_rmem[i] = HIDDEN;
        }
      }
    }
    unchecked = HIDES_KEYS;
  };
  auto side = [&](int n) {  // of the tile, for the warpgroup's queries and those behind them, where walks start
    return side_of(p, work.m0 + wg * WG_QUERIES, work.m0 + TILE_QUERIES, tile(n));
  };
  // Scores become probabilities against the stale reference. Returns whether they were too large for it.
  auto take_stale = [&](int n) {
    auto always = [](const float (&)[2]) { return true; };
    if constexpr (ADDENDS_LAST) {
      modify(n);
      return softmax.take_stale<true>(s_rmem, TileSoftmax::scaled(scale), always);
    }
    const int kv0 = first_key(n);
    const Scorer scorers[2] = {{p, {work.batch, head(work, 0)}, query(work, 0), kv0, side(n) * slope[0]},
                               {p, {work.batch, head(work, 1)}, query(work, 1), kv0, side(n) * slope[1]}};
    auto take = [&](auto size, auto fits) {
      return softmax.take_stale<SCORES_HIDE || HIDES_PLAINLY>(s_rmem, [&](float qk, int i, float origin) {
        const auto known = size.template with<true>(addend(i));
        return scorers[i / 2 % 2].exponent(qk, scale, origin, 0, i / 4 * 8 + i % 2, known);
      }, fits);
    };
    if (MAY_BE_TINY && tiny) {
      tiny = !take(Known<Size::TINY>(), [&](const float (&lane_sum)[2]) {
        return were_tiny(p, softmax.level(0, lane_sum[0])) && were_tiny(p, softmax.level(1, lane_sum[1]));
      });
      return !tiny;
    }
    return by_size(p, s_rmem, [&](auto size) { return take(size, always); });
  };
  auto round_p = [&](int n) {  // what is kept of it
    constexpr bool SHARES = cfg::PACK == 1;  // random bits, by rows of one head
    const int kv0 = first_key(n);
    const Scorer scorers[2] = {{p, {work.batch, head(work, 0)}, SHARES ? query(work, 0) & ~8 : query(work, 0), kv0},
                               {p, {work.batch, head(work, 1)}, query(work, 1), kv0}};
#pragma unroll
    for (int i = 0; i < KEY_STEPS * 4; i++) {
      const u32 pair = pack2<Element>(s_rmem[2 * i], s_rmem[2 * i + 1]);
      p_rmem[i / 4][i % 4] = scorers[SHARES ? 0 : i % 2].kept(pair, SHARES ? i % 2 * 8 : 0, i / 2 * 8);
    }
  };
  auto rescale = [&](const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < TILE_DV / 2; i++) o_rmem[i] *= factor[i / 2 % 2];
  };

  // ---- Hidden keys whose v is inf or NaN
  auto check_output = [&]() {
    unchecked = false;
    return is_finite(o_rmem);
  };
  auto redo_output = [&](int begin) {  // o of the key tiles from `begin` on, against the references as they are
    const auto found = own_of(work);
    const int queries[2] = {query(work, 0), query(work, 1)};
    const Head heads[2] = {{work.batch, head(work, 0)}, {work.batch, head(work, 1)}};
    sum_visible_values(found.p, o_rmem, queries, heads, range, softmax.reference, scale, begin, lane);
  };
  auto make_hidden_harmless = [&](int begin) {  // once the products with all key tiles from `begin` on are there
    if (HIDES_KEYS && unchecked && __builtin_expect(!check_output(), 0)) redo_output(begin);
  };
  auto make_all_hidden_harmless = [&](const Work& done) {  // of an output tile, perhaps when there is another already
    if (!HIDES_KEYS || !unchecked || __builtin_expect(check_output(), 1)) return;
    const Work next = work;
    const KeyWalk next_range = range;
    const auto found = own_of(done);
    work = done;
    range = find_range(found.p, work, tile_keys(found.p, work));
    redo_output(range.begin);
    work = next, range = next_range;
  };

  // ---- Steps: p of key tile n, whose scores are there, beside o += p v of the tile before
  auto first_step = [&](int n) {  // there is no tile before
    float factor[2];
    look_up(n);
    if (!ADDENDS_AHEAD) release_k(n), k.advance();
    load_ahead(n);
    prepare(n);
    modify(n);
    if (ADDENDS_AHEAD) release_k(n), k.advance();
    if (hides(n)) hide(n);
    softmax.take_raised<true>(s_rmem, scale, factor);
    round_p(n);
  };
  bool rising = false;  // ADAPTS: the warp's last step was outgrown
  auto compute_again = [&]() {  // scores that were overwritten
    warp_products<Element, WG_ROWS, TILE_N, D_STEPS>(s_rmem, smem_u32(smem.q[q.index()][wg]), warp_row,
                                                     smem_u32(smem.k[k.index]), lane);
    fence_proxy_async_shared();
    __syncwarp();
  };
  auto raising_step = [&](int n) {
    float factor[2];
    bool raised = true;
    if (!ADDENDS_AHEAD) release_k(n), k.advance();
    modify(n);
    if (ADDENDS_AHEAD) release_k(n), k.advance();
    if (!(RAISES || ADAPTS || HIDES_ANYWHERE) || hides(n)) hide(n);
    if constexpr (BY_ELEMENT) {
      raised = rising = softmax.take_checked(s_rmem, scale, factor);
    } else {
      softmax.take_raised<true>(s_rmem, scale, factor);
    }
    finish_output();
    if (raised) rescale(factor);
    round_p(n);
  };
  auto hide_plainly = [&](int n) {
    if (HIDES_PLAINLY && hides(n)) hide(n);
  };
  auto full_step = [&](int n) {  // HIDES_PLAINLY: or one that hides something
    hide_plainly(n);
    const bool outgrown = take_stale(n);
    rising = outgrown;
    if (!outgrown) release_k(n);
    finish_output();
    if constexpr (!ENDS_HIDDEN && !HIDES_PLAINLY) make_hidden_harmless(n + 1);
    if (outgrown) {
      float factor[2];
      compute_again();
      modify(n);
      hide_plainly(n);
      softmax.take_raised<SCORES_HIDE || HIDES_PLAINLY>(s_rmem, scale, factor);
      rescale(factor);
      release_k(n);
    }
    k.advance();
    round_p(n);
  };
  // ADAPTS: either of them, with one code for scores that are made into probabilities again and for those at first.
  auto adapting_step = [&](int n, bool full) {
    const bool stale = full && !rising, again = stale && take_stale(n);
    if (stale && !again) {
      release_k(n);
      finish_output();
      make_hidden_harmless(n + 1);
      k.advance();
      round_p(n);
    } else {
      if (again) compute_again();
      raising_step(n);
    }
  };

  // ---- The end of an output tile
  auto part_begin = [&](const Work& work, i64 of_batch) {  // SPLIT: of the results of a part of the keys
    return cfg::SPLIT ? keys_part(p, work) * (cfg::PACKED ? 1 : p.batch) * of_batch : 0;
  };
  auto finish_rows = [&](float (&inverse)[2]) {  // and their lse
    const auto found = own_of(work);
    const Params& p = found.p;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float lse;
      softmax.finish(r, inverse[r], lse);
      inverse[r] *= kept_scale(p);
      if (p.lse && lane % 4 == 0 && query(work, r) < p.seqlen_q) {
        const i64 part = part_begin(work, (i64)p.num_heads_q * (VARLEN ? p.rows_q : p.seqlen_q));
        p.lse[part + rows_begin(p, flat_head(p, work.batch, head(work, r))) + query(work, r)] = lse;
      }
    }
  };
  auto store_directly = [&](const Work& work, const float (&inverse)[2]) {
    const auto found = own_of(work);
    const Params& p = found.p;
    auto o_row = [&](int r) -> cfg::Output* {
      if (query(work, r) >= p.seqlen_q) return nullptr;
      return p.o + part_begin(work, p.o_stride[0]) + q_begin(p, work.batch, p.o_stride) +
             query(work, r) * p.o_stride[1] + head(work, r) * p.o_stride[2];
    };
    store_rows<TILE_DV, cfg::Output>(o_row, p.head_dim_v, o_rmem, inverse, lane);
  };
  auto store = [&](const Work& work, int stage, const float (&inverse)[2]) {
    if constexpr (STORES_TMA) store_by_tma(params, smem.q[stage][wg], o_rmem, inverse, work, wg * WG_ROWS, warp_row, lane);
    else store_directly(work, inverse);
  };
  auto finish_store = [&](int stage) {
    if (!STORES_TMA || lane > 0) return;
    bulk_wait_read<0>();
    mbarrier_arrive(&smem.q_empty[stage][wg]);
  };

  if (PING_PONG && wg == CONSUMERS - 1) pass_turn();  // the first turn is warpgroup 0's
  bool scored = false;                                // whether the first scores are there already
  receive_work();
  while (work.valid()) {
    float inverse[2];
    tiny = may_be_tiny(p);
#pragma unroll
    for (int r = 0; r < 2; r++) {  // what has no key counts in one part of the keys
      const float start = keys_part(p, work) == 0 ? row_start(p, {work.batch, head(work, r)}) : NEG_INF;
      softmax.begin(r, start, lane % 4 == 0);
    }
#pragma unroll
    for (int i = 0; i < TILE_DV / 2; i++) o_rmem[i] = 0;
    if (!scored) skip(before);
    if (range.begin == range.end) {
      finish_rows(inverse);
      store_directly(work, inverse);
      release(&smem.q_empty[q.index()][wg]);
      q.advance();
      receive_work();
      scored = false;
      continue;
    }
    if (!scored) {
      start_scores();
      wgmma_wait<0>();
      wgmma_hold(s_rmem);
    }
    first_step(range.end - 1);
    for (int n = range.end - 2; !cfg::ONE_KEY_TILE && n >= range.begin; n--) {
      look_up(n);
      const bool full = HIDES_PLAINLY || (!RAISES && !hides(n) && side(n));
      if constexpr (ADAPTS) {
        start_step(n);
        adapting_step(n, full);
      } else if (full) {
        start_step(n);
        full_step(n);
      } else {
        start_step(n);
        raising_step(n);
      }
    }

    start_output();
    finish_rows(inverse);
    if constexpr (HIDES_PLAINLY) finish_output(), make_hidden_harmless(range.begin);  // long code, in one place
    const Work done = work;
    const int rest = behind, stage = q.index();
    // Else loads wait for the rest, q for loads.
    const bool early = cfg::SCORE_EARLY && rest == 0 && (ENDS_HIDDEN || !unchecked);
    q.advance();
    scored = false;
    if (early) {
      receive_work();
      scored = work.valid() && range.begin < range.end && before == 0;
    }
    if (scored) {
      start_scores();
      if constexpr (!HIDES_PLAINLY) {
        wgmma_wait<1>();
        hold_output();
        release_v();
      }
      if constexpr (ENDS_HIDDEN) make_all_hidden_harmless(done);
      store(done, stage, inverse);
      wgmma_wait<0>();
      wgmma_hold(s_rmem);
      finish_store(stage);
    } else {
      if constexpr (!HIDES_PLAINLY) finish_output();
      if constexpr (ENDS_HIDDEN) make_all_hidden_harmless(done);
      else if constexpr (!HIDES_PLAINLY) make_hidden_harmless(range.begin);
      skip(rest);
      store(done, stage, inverse);
      finish_store(stage);
      if (!early) receive_work();
    }
  }
}
