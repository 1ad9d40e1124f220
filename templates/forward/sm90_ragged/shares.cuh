// Follows forward/sm90/lists.cuh, whose fixes belong here too. Apart, since the machine code of 20 of 40 dense kernels
// changed when both families shared this text.
//
// Scores that a thread of a consumer has of a row in a block, its share: keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9, ... from
// the block's first on, for one of four threads c. Their mask is as many bits, in words.
constexpr int kShare = kBlockKV / 4, kShareWords = div_up(kShare, 32);
