// What lines.cuh does for elements as they are, through a codec: small and middle messages in one kernel
// without counters or slots.
//
// An image is a tile of 512 elements, encoded, with the layout of a chunk; it travels in lines of 128
// bytes, 120 of payload and a flag of 8 (prims/ll128.cuh): 8-bit codes with their scales fill 4.3 of 5.
//
// Phases, per image, which a warp works on: encode the own contribution, or that to each peer's part or
// block, and store it to every peer's area, or that peer's; poll the images of all peers, decode and add
// them with the own contribution in the order of ranks; store the sum, or encode it again, send it to all
// and store what they will decode; poll what the others have summed up, decode and store it. An all_gather
// leaves the sums out. A block goes through its images in slices of one for each warp, or of a few where few
// peers send each of them, and has sent the next slice before it waits for what the peers have of the last
// one.
// Launch: any number of blocks that are resident at once, MOVERS threads with a stage of shared memory for
// each warp; each block takes an equal share of the images. Bytes out, of a message or block whose images
// take w bytes of lines: (N - 1) w; in two trips 2 (N - 1) / N w.
//
// The bits are those of the schedules of the same name for parts of one chunk each: blocks of scale begin
// where a part begins, and sums are formed in the same order.
//
// Nobody has a greeting for anybody: all ranks send all others as many images, those of parts that are
// shorter, or empty, too. In place, what a warp writes of its own part or of the whole message only that
// warp has read; what it writes of another rank's part comes of what that rank was sent before.
#pragma once

#include "codec/codec.cuh"
#include "fused/exchange.cuh"
#include "prims/held.cuh"
#include "prims/ll128.cuh"
#include "prims/residuals.cuh"

namespace cinch {

template <class E, class C>
class CodedExchange {
 public:
  static __device__ __forceinline__ void exchange(const cinch_oneshot_args &args, uint64_t epoch,
                                                 uint32_t *stopped) {
    CodedExchange(args, epoch, stopped).run();
    if (args.residuals != nullptr) {
      __syncthreads();
      if (threadIdx.x == 0 && stopped[0] == 0) end_feedback(*args.residuals, gridDim.x);
    }
  }

 private:
  using Lane = Held<E>;
  using Codes = typename C::Codes;
  using Tiles = ElementTiles<Lane::SIZE>;

  // An image that goes to a peer, or comes from one: the k-th behind this rank.
  struct Message {
    uint32_t image, k;
  };

  // An image in groups of four lines; images that a warp waits for together, and so groups.
  static constexpr uint32_t GROUP_BYTES = 8 * TILE_WORDS;
  static constexpr uint32_t GROUPS = (Images<C>::BYTES + GROUP_BYTES - 1) / GROUP_BYTES;
  static constexpr uint32_t SOURCES = 4;
  static constexpr uint32_t TOGETHER = SOURCES * GROUPS;
  // Images of a slice that a warp has, at most.
  static constexpr uint32_t BATCH = SMALL_BLOCKS ? 1 : SOURCES;
  // In a stage: a tile on its way in or out, what was received, and images to send. The last slice's are
  // still there when a one-shot adds them.
  static constexpr uint32_t RECEIVED = Tiles::BYTES;
  static constexpr uint32_t BUILT = RECEIVED + TOGETHER * GROUP_BYTES;
  static constexpr uint32_t IMAGE_ROOM = (Images<C>::BYTES + 127) / 128 * 128;
  static_assert(BUILT + 2 * BATCH * IMAGE_ROOM <= STAGE_BYTES, "what the host launches with");
  // Payload of the lines that an image takes at most, and the word that a flag is in place of.
  static constexpr uint32_t LINE_PAYLOAD = CINCH_LINE_BYTES - 8;
  static constexpr uint32_t READ =
      (Images<C>::BYTES + LINE_PAYLOAD - 1) / LINE_PAYLOAD * LINE_PAYLOAD + 8;
  static_assert(BUILT + (2 * BATCH - 1) * IMAGE_ROOM + READ <= STAGE_BYTES, "no other warp's");
  static_assert(C::scaled, "sums of others would need canonical NaN before they are encoded");

  __device__ __forceinline__ CodedExchange(const cinch_oneshot_args &args, uint64_t epoch,
                                          uint32_t *stopped)
      : args_(args),
        comm_(args.comm),
        codec_(args.codec),
        stop_{stopped},
        flag_(args.mark | (epoch + 1)),
        area_(args.area + (epoch & 1) * args.half),
        factor_(args.flags & CINCH_FACTOR_AT ? E::factor_at(args.factor) : args.factor),
        image_bytes_(args.image_lines * CINCH_LINE_BYTES),
        sends_parts_(args.phases & CINCH_SENDS_PARTS),
        sums_(args.phases & CINCH_SUMS),
        sends_sums_(args.phases & CINCH_SENDS_SUMS),
        step_{MOVER_WARPS / others(), MOVER_WARPS % others()},
        batch_(others() < BATCH ? BATCH / others() : 1) {
    CINCH_GRANTED(codec_.log2_block() != 0);
    const uint32_t all = (args.words + WARP_TILE - 1) / WARP_TILE;
    first_ = blockIdx.x * args.share;
    images_ = all > first_ ? min(args.share, all - first_) : 0;
    lines_ = 0;
#pragma unroll
    for (uint32_t j = 0; j < TOGETHER; ++j) lines_ |= (uint32_t)has_line(j % GROUPS) << j;
  }

  __device__ __forceinline__ void run() const {
    const uint32_t slices = (images_ + slice_images() - 1) / slice_images();
    const bool gathers = !sums_ || sends_sums_;
    const uint32_t behind = sends_sums_ ? 2 : 1;  // slices that the last phase is
#pragma unroll 1
    for (uint32_t slice = 0; slice < slices + behind; ++slice) {
      if (slice < slices) send(slice);
      if (sums_ && slice - 1 < slices && !sum(slice - 1)) return;
      if (gathers && slice - behind < slices && !gather(slice - behind)) return;
    }
  }

  // Each rank starts with another peer, so that no port gets all messages at once.
  __device__ __forceinline__ uint32_t others() const { return comm_.nranks - 1; }
  __device__ __forceinline__ uint32_t peer_at(uint32_t k) const {
    const uint32_t peer = comm_.rank + k;
    return peer >= comm_.nranks ? peer - comm_.nranks : peer;
  }

  // Images of a slice, at most; the first one and their number. Each warp has every MOVER_WARPS-th of them.
  __device__ __forceinline__ uint32_t slice_images() const { return MOVER_WARPS * batch_; }
  __device__ __forceinline__ uint32_t begin(uint32_t slice) const {
    return first_ + slice * slice_images();
  }
  __device__ __forceinline__ uint32_t count(uint32_t slice) const {
    return min(images_ - slice * slice_images(), slice_images());
  }

  // Messages of a slice are numbered image by image, so that warps have neighbouring ones, and so different
  // peers; each warp takes every MOVER_WARPS-th of them.
  __device__ __forceinline__ Message message(uint32_t slice, uint32_t number) const {
    return {begin(slice) + number / others(), 1 + number % others()};
  }
  __device__ __forceinline__ Message behind(Message at) const {
    at.image += step_.image, at.k += step_.k;
    if (at.k > others()) at.k -= others(), ++at.image;
    return at;
  }

  // Elements of the part of `rank`, or of a block, or of the message; and where they begin in its buffer,
  // if that has several.
  __device__ __forceinline__ uint32_t elements_of(uint32_t rank) const {
    const uint32_t all = (uint32_t)args_.count, begin = rank * args_.words;
    if (!sends_sums_) return all;
    return all > begin ? min(all - begin, args_.words) : 0;
  }
  __device__ __forceinline__ uint64_t start_of(uint32_t rank) const {
    return (uint64_t)rank * (sends_sums_ ? args_.words : (uint32_t)args_.count);
  }

  // A tile of this rank's contribution to a part or block, on its way if it is a whole one.
  struct Ahead {
    const uint8_t *from;
    uint32_t n, at;  // elements there are, and the tile's first
    bool is_whole;
  };
  __device__ __forceinline__ Ahead fetch(uint32_t rank, uint32_t image) const {
    Ahead ahead;
    ahead.from = (const uint8_t *)args_.input + (sends_parts_ ? start_of(rank) * Lane::SIZE : 0);
    ahead.n = elements_of(rank);
    ahead.at = image * WARP_TILE;
    ahead.is_whole = (uintptr_t)ahead.from % 16 == 0 && ahead.at + WARP_TILE <= ahead.n;
    if (ahead.is_whole) {
      Tiles::fetch(this_stage(), ahead.from + (uint64_t)ahead.at * Lane::SIZE);
      end_copies();
    }
    return ahead;
  }
  // This lane's elements of it, by all lanes; then another tile may be on its way. Of a NaN there is nothing
  // left in codes, and the canonical one in sums.
  __device__ __forceinline__ void take(const Ahead &ahead, float (&x)[HELD]) const {
    const uint32_t i = Lane::mine(ahead.at);
    uint4 v[Lane::PIECES];
    if (ahead.is_whole) {
      await_copies<0>();
      __syncwarp();
      Tiles::take(this_stage(), v);
      Lane::template unpack<true>(v, x);
      __syncwarp();
    } else if (Lane::is_whole(ahead.from, ahead.n, i)) {
      Lane::load_pieces(ahead.from, i, v);
      Lane::template unpack<true>(v, x);
    } else {
      Lane::load_some(ahead.from, ahead.n, i, x);
    }
    if (args_.flags & CINCH_PREMULTIPLY) {
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = E::premultiply(x[k], factor_);
    }
  }

  // A tile of the output of `rank`, by all lanes; nothing is on its way in.
  __device__ __forceinline__ void store(uint32_t rank, uint32_t image, bool is_free_of_nan,
                                        const float (&x)[HELD]) const {
    const bool has_one_block = sums_ && !sends_sums_;
    uint8_t *to = (uint8_t *)args_.output + (has_one_block ? 0 : start_of(rank) * Lane::SIZE);
    const uint32_t n = elements_of(rank), at = image * WARP_TILE;
    if ((uintptr_t)to % 16 == 0 && at + WARP_TILE <= n) {
      uint4 v[Lane::PIECES];
      Lane::pack(x, is_free_of_nan, v);
      __syncwarp();  // all lanes have read what they stored last
      Tiles::give(this_stage(), v, to + (uint64_t)at * Lane::SIZE);
      __syncwarp();  // the next one may be on its way in
    } else {
      Lane::store_some(to, n, Lane::mine(at), x);
    }
  }

  // What is seldom, and much code, has functions of its own: they work on a copy, so that what a lane holds
  // stays in registers.
  template <class Does>
  static __device__ __forceinline__ void out_of_line(float (&x)[HELD], Does &&does) {
    float y[HELD];
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) y[k] = x[k];
    does(y);
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) x[k] = y[k];
  }
  static __device__ __noinline__ void divide_all(uint32_t nranks, float (&x)[HELD]) {
#pragma unroll 1
    for (uint32_t k = 0; k < HELD; ++k) x[k] = E::divide(x[k], nranks);
  }

  // Encodes a tile of the part or block of `rank`, of which there are n elements: contributions (0) or
  // sums (1).
  __device__ __forceinline__ void encode(uint32_t which, uint32_t rank, uint32_t n, uint32_t image,
                                         float (&x)[HELD], uint8_t *to) const {
    const uint32_t i = Lane::mine(image * WARP_TILE);
    const uint32_t first = sends_parts_ ? (uint32_t)start_of(rank) : 0;
    if (args_.residuals != nullptr) {
      out_of_line(x, [&](float (&y)[HELD]) { encode_fed(args_, which, first, n, i, y, to); });
    } else {
      Codes codes;
      codec_.encode(x, codec_.summary(x, Lane::valid(n, i)), n, i, codec_.random(which, first), codes);
      __syncwarp();  // all lanes have read what was there
      codec_.store(to, WARP_TILE, Lane::mine(0), codes);
    }
  }
  // The same with error feedback.
  static __device__ __noinline__ void encode_fed(const cinch_oneshot_args &args, uint32_t which,
                                                 uint32_t first, uint32_t n, uint32_t i,
                                                 float (&x)[HELD], uint8_t *to) {
    const C codec(args.codec);
    CINCH_GRANTED(codec.log2_block() != 0);
    const uint32_t there = Lane::valid(n, i);
    const Residuals residuals(args.residuals, args.span, first + i);
    residuals.add_to(x, there);
    Codes codes;
    codec.encode(x, codec.summary(x, there), n, i, codec.random(which, first), codes);
    __syncwarp();
    codec.store(to, WARP_TILE, Lane::mine(0), codes);
    float seen[HELD];
    codec.decode(codes, seen);
    residuals.keep(x, seen, there);
  }
  __device__ __forceinline__ void take(const uint8_t *image, Codes &codes) const {
    codec_.load(image, WARP_TILE, Lane::mine(0), codes);
  }

  // Decodes image number `index` into the output of `rank`.
  __device__ __forceinline__ void keep(const uint8_t *image, uint32_t index, uint32_t rank) const {
    Codes codes;
    take(image, codes);
    float x[HELD];
    codec_.decode(codes, x);
    store(rank, index, C::is_free_of_nan(codes), x);
  }

  struct Source {
    uint32_t rank, image;
  };

  // Where this warp builds the b-th of its images of a slice, and where those that it receives together lie.
  static __device__ __forceinline__ uint8_t *built(uint32_t slice, uint32_t b) {
    return this_stage() + BUILT + (slice % 2 * BATCH + b) * IMAGE_ROOM;
  }
  static __device__ __forceinline__ uint8_t *received(uint32_t s) {
    return this_stage() + RECEIVED + s * GROUPS * GROUP_BYTES;
  }

  // Where image `index` of a trip lies in a box.
  __device__ __forceinline__ uint8_t *place(uint8_t *box, uint32_t trip, uint32_t index) const {
    const uint64_t begin = area_ + (trip == 0 ? 0 : args_.half / 2);
    return box + begin + (uint64_t)index * image_bytes_;
  }
  // Whether group g of an image has a line for this lane.
  __device__ __forceinline__ bool has_line(uint32_t g) const {
    return 4 * g + lane_id() / LINE_LANES < args_.image_lines;
  }
  // This lane's words of a group, in shared memory.
  static __device__ __forceinline__ uint2 *words_of(uint8_t *group) {
    return (uint2 *)group + word_of_lane();
  }

  // An image to the peers from number k on, before number `end`.
  __device__ __forceinline__ void send_image(uint8_t *image, uint32_t trip, uint32_t index,
                                             uint32_t k, uint32_t end) const {
    __syncwarp();  // all lanes have stored their codes
    uint4 v[GROUPS];
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; ++g) {
      // What is behind an image is in the stage, and of no use.
      const uint2 *words = words_of(image + g * GROUP_BYTES);
      v[g] = make_uint4(0, 0, 0, 0);
      if (has_line(g)) v[g] = make_uint4(words[0].x, words[0].y, words[1].x, words[1].y);
    }
    __syncwarp();
#pragma unroll 1
    for (; k < end; ++k) {
      uint8_t *to = place(comm_.outbox[peer_at(k)], trip, index);
#pragma unroll
      for (uint32_t g = 0; g < GROUPS; ++g) {
        store_lines(to + g * LINES_BYTES, v[g], flag_, has_line(g));
      }
    }
  }

  // Waits for images, which come to lie at received(s): those of `wanted` have bits, and `next()` gives the
  // rank and the number of each, one after the other, `from(s)` the rank of one. False if the wait ended
  // early.
  template <class Next, class From>
  __device__ __forceinline__ bool receive(uint32_t trip, uint32_t wanted, Next &&next,
                                          From &&from) const {
    const uint8_t *lines[SOURCES];
    uint32_t missing = 0;
#pragma unroll
    for (uint32_t s = 0; s < SOURCES; ++s) {
      const Source source = next();
      if (wanted >> s & 1) {
        lines[s] = place(comm_.inbox[source.rank], trip, source.image);
        missing |= ((1u << GROUPS) - 1) << s * GROUPS;
      }
    }
    const uint32_t all = missing;
    const auto at = [&](uint32_t j) { return lines[j / GROUPS] + j % GROUPS * LINES_BYTES; };
    const auto wants = [&](uint32_t) { return flag_; };
    const auto name = [&](uint32_t j) { return from(j / GROUPS); };
    uint4 v[TOGETHER];
    if (!load_lines(comm_, stop_, missing, at, wants, name, v, lines_)) return false;
#pragma unroll
    for (uint32_t j = 0; j < TOGETHER; ++j) {
      if ((all & lines_) >> j & 1) {
        uint2 *words = words_of(received(0) + j * GROUP_BYTES);
        words[0] = make_uint2(v[j].x, v[j].y);
        if (!carries_flag()) words[1] = make_uint2(v[j].z, v[j].w);
      }
    }
    __syncwarp();
    return true;
  }

  // This rank's elements of a slice.
  __device__ __forceinline__ void send(uint32_t slice) const {
    const uint32_t all = sends_parts_ ? count(slice) * others() : count(slice);
    uint32_t number = mover_warp();
    if (number >= all) return;
    // What is for all is no part of any of them.
    Message at = sends_parts_ ? message(slice, number) : Message{begin(slice) + number, 0};
    Ahead ahead = fetch(peer_at(at.k), at.image);
#pragma unroll 1
    for (uint32_t b = 0;; ++b) {
      const Message own = at;
      const uint32_t n = ahead.n;
      float x[HELD];
      take(ahead, x);
      number += MOVER_WARPS;
      const bool is_last = number >= all;
      // Only a one-shot comes back to its images.
      uint8_t *image = built(slice, sends_parts_ ? 0 : b);
      if (!is_last) {
        at = sends_parts_ ? behind(at) : Message{at.image + MOVER_WARPS, 0};
        if (sums_) ahead = fetch(peer_at(at.k), at.image);
      }
      encode(0, peer_at(own.k), n, own.image, x, image);
      if (sends_parts_) {
        send_image(image, 0, own.image, own.k, own.k + 1);
      } else {
        send_image(image, 0, own.image, 1, comm_.nranks);
        if (!sums_) {
          // As the others see it.
          keep(image, own.image, comm_.rank);
          if (!is_last) ahead = fetch(comm_.rank, at.image);
        }
      }
      if (is_last) return;
      __syncwarp();  // all lanes have read the image
    }
  }

  // The sums of a slice. False if a wait ended early.
  __device__ __forceinline__ bool sum(uint32_t slice) const {
    const uint32_t own = comm_.rank;
#pragma unroll 1
    for (uint32_t b = 0; b < batch_; ++b) {
      const uint32_t number = mover_warp() + b * MOVER_WARPS, index = begin(slice) + number;
      if (number >= count(slice)) break;
      uint8_t *image = built(slice, b);
      Ahead ahead;
      if (sends_parts_) ahead = fetch(own, index);  // before the wait
      float x[HELD];
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = -0.0f;
      // The others in the order of ranks, this one in its place: number o of them is rank o or o + 1.
#pragma unroll 1
      for (uint32_t o = 0; o <= others(); ++o) {
        if (o == own) {
          if (sends_parts_) {
            float mine[HELD];
            take(ahead, mine);
#pragma unroll
            for (uint32_t k = 0; k < HELD; ++k) x[k] = add(x[k], mine[k]);
          } else {
            // As the others see it.
            Codes codes;
            take(image, codes);
            codec_.decode_reduce(codes, x);
          }
        }
        if (o == others()) break;
        // Those of all images of the batch come together, or some of one image after the other.
        if (o % SOURCES == 0 && (b == 0 || batch_ == 1)) {
          const uint32_t left = (count(slice) - number + MOVER_WARPS - 1) / MOVER_WARPS;
          const uint32_t there =
              batch_ == 1 ? min(others() - o, SOURCES) : min(left, batch_) * others();
          Source coming = {o, index};
          const auto next = [&] {
            const Source source = {rank_of(coming.rank), coming.image};
            if (++coming.rank == others()) coming = {0, coming.image + MOVER_WARPS};
            return source;
          };
          const auto from = [&](uint32_t s) { return rank_of((o + s) % others()); };
          if (!receive(0, (1u << there) - 1, next, from)) return false;
        }
        Codes codes;
        take(received(batch_ == 1 ? o % SOURCES : b * others() + o), codes);
        codec_.decode_reduce(codes, x);
      }
      if (args_.flags & CINCH_AVERAGE) average(comm_.nranks, x);
      if (sends_sums_) {
        encode(1, own, ahead.n, index, x, image);
        send_image(image, 1, index, 1, comm_.nranks);
        keep(image, index, own);
      } else {
#pragma unroll
        for (uint32_t k = 0; k < HELD; ++k) x[k] = canonical(x[k]);
        store(own, index, false, x);
      }
    }
    return true;
  }
  __device__ __forceinline__ uint32_t rank_of(uint32_t o) const {
    return o < comm_.rank ? o : o + 1;
  }

  static __device__ __forceinline__ void average(uint32_t nranks, float (&x)[HELD]) {
    if ((nranks & (nranks - 1)) == 0) {
      // The product by a power of two is the quotient.
      const float share = 1.0f / (float)nranks;
#pragma unroll
      for (uint32_t k = 0; k < HELD; ++k) x[k] = mul(x[k], share);
    } else {
      out_of_line(x, [&](float (&y)[HELD]) { divide_all(nranks, y); });
    }
  }

  // What the others have of a slice, as it is or summed up. False if a wait ended early.
  __device__ __forceinline__ bool gather(uint32_t slice) const {
    const uint32_t all = count(slice) * others();
    uint32_t number = mover_warp();
    if (number >= all) return true;
    Message at = message(slice, number);
#pragma unroll 1
    for (; number < all; number += SOURCES * MOVER_WARPS) {
      const uint32_t there = min(SOURCES, (all - number + MOVER_WARPS - 1) / MOVER_WARPS);
      Message coming = at;
      const auto next = [&] {
        const Source source = {peer_at(coming.k), coming.image};
        coming = behind(coming);
        return source;
      };
      const auto from = [&](uint32_t s) {
        return peer_at(message(slice, number + s * MOVER_WARPS).k);
      };
      if (!receive(sums_ ? 1 : 0, (1u << there) - 1, next, from)) return false;
#pragma unroll 1
      for (uint32_t s = 0; s < there; ++s, at = behind(at)) {
        const uint32_t rank = peer_at(at.k);
        // Of parts that are shorter some images have nothing.
        if (at.image * WARP_TILE < elements_of(rank)) keep(received(s), at.image, rank);
      }
    }
    return true;
  }

  const cinch_oneshot_args &args_;
  const cinch_comm_view &comm_;
  const C codec_;
  Stop stop_;
  uint64_t flag_, area_, factor_;
  uint32_t image_bytes_, lines_;  // of an image; of what is waited for together, those of this lane
  bool sends_parts_, sums_, sends_sums_;
  uint32_t first_, images_;  // of this block
  Message step_;    // from a message of a warp to its next one
  uint32_t batch_;  // images of a slice that a warp has
};

}  // namespace cinch
