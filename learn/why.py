"""Why each line of flash.py is there, in a sentence. The page shows the sentence of the current line."""

Reasons = dict[str, str]  # of lines, without their indentation

EVERYWHERE: Reasons = {
    "scale = 1 / math.sqrt(hbm.Q.tensor.shape[1])": (
        "A score of d products grows with √d; divided by it, the softmax is as soft for any d."
    ),
    "if not see(i, j).any():": "A tile of which no query sees anything is not even loaded.",
    "continue": "The mask hides the whole tile, so it is skipped.",
    "s = (scale * q @ k.T).masked_fill(~see(i, j), -torch.inf)": (
        "Scores exist for this tile alone; one that is not seen becomes −∞, whose exponential is 0."
    ),
}
FORWARD_1: Reasons = {
    "for j in tiles(len(hbm.K), B_c):": "Keys outside: a tile of K and V is loaded once in the whole pass.",
    "k, v = hbm.K.load(j), hbm.V.load(j)": "These keys and values stay while all queries pass by.",
    "for i in tiles(len(hbm.Q), B_r):": "Queries inside: they pass by again with each tile of keys.",
    "q, o_i, l_i, m_i = hbm.Q.load(i), hbm.O.load(i), hbm.l.load(i), hbm.m.load(i)": (
        "The unfinished rows come back from slow memory for each tile of keys: the price of this order of loops."
    ),
    "m_new = torch.maximum(m_i, s.amax(dim=1, keepdim=True))": (
        "The largest score so far is subtracted below, so that no exponential overflows."
    ),
    "p = torch.exp(s - m_new)": "Not divided by the sum yet, because later tiles still add to it.",
    "alpha = torch.exp(m_i - m_new)": "The factor that rescales old sums from the old maximum to the new one.",
    "l_new = alpha * l_i + p.sum(dim=1, keepdim=True)": (
        "The softmax's sum, rescaled to the new maximum before this tile is added."
    ),
    "o_new = (alpha * l_i * o_i + (p * keep(i, j)) @ v) / l_new.clamp(min=torch.finfo(l_new.dtype).tiny)": (
        "o is already divided by the old sum: undo that, add this tile, and divide by the new sum, for every tile."
    ),
    "hbm.O.store(i, o_new)": "The next queries need the fast memory, so these rows go out unfinished.",
    "hbm.l.store(i, l_new)": "The next tile of keys continues this sum.",
    "hbm.m.store(i, m_new)": "The next tile of keys needs the maximum to which this sum belongs.",
}
FORWARD_2: Reasons = {
    "for i in tiles(len(hbm.Q), B_r):": "Queries outside: their rows stay in fast memory until they are finished.",
    "q = hbm.Q.load(i)": "Each query is loaded once in the whole pass.",
    "m = torch.full_like(q[:, :1], lowest(q.dtype))": (
        "No score was read yet; a finite start keeps the exponential of a difference from being NaN."
    ),
    "l = torch.zeros_like(m)": "Nothing has been summed yet.",
    "o = torch.zeros_like(q)": "The output adds up here and leaves fast memory only when it is finished.",
    "for j in tiles(len(hbm.K), B_c):": "Keys inside: all of them pass by these queries, a tile at a time.",
    "k, v = hbm.K.load(j), hbm.V.load(j)": "Only one tile has to fit into fast memory, however many keys there are.",
    "m_new = torch.maximum(m, s.amax(dim=1, keepdim=True))": (
        "The largest score so far is subtracted below, so that no exponential overflows."
    ),
    "p = torch.exp(s - m_new)": "Not divided by the sum yet, because later tiles still add to it.",
    "alpha = torch.exp(m - m_new)": "The factor that rescales old sums from the old maximum to the new one.",
    "l = alpha * l + p.sum(dim=1, keepdim=True)": (
        "The softmax's sum, rescaled to the new maximum; dropout does not change it."
    ),
    "o = alpha * o + (p * keep(i, j)) @ v": "No division: FlashAttention-2 divides once, when all keys have passed.",
    "m = m_new": "The next tile continues under this maximum.",
    "hbm.O.store(i, o / l)": "One division finishes the rows, and they are written once.",
    "hbm.lse.store(i, m + torch.log(l))": (
        "The backward pass recomputes P from this one number a row instead of m and l."
    ),
}
BACKWARD: Reasons = {
    "for j in tiles(len(hbm.K), B_c):": "Keys outside: their gradients add up in fast memory and are written once.",
    "k, v = hbm.K.load(j), hbm.V.load(j)": "These keys and values stay while all queries pass by.",
    "dk, dv = torch.zeros_like(k), torch.zeros_like(v)": (
        "The gradients from all queries to these keys and values add up here."
    ),
    "dv = dv + (p * keep(i, j)).T @ do": (
        "Each query passes dO back to a value with the weight that the value had in the forward pass."
    ),
    "dp = do @ v.T * keep(i, j)": "The gradient of the weights, under the dropout mask of the forward pass.",
    "ds = p * (dp - delta)": (
        "The softmax's derivative: the weights of a row sum to 1, so the row's mean of dP, delta, is subtracted."
    ),
    "hbm.dQ.store(i, hbm.dQ.load(i) + scale * ds @ k)": (
        "These queries are needed again for the next keys, so their gradient adds up in slow memory."
    ),
    "dk = dk + scale * ds.T @ q": "These keys stay, so their gradient adds up in fast memory.",
    "hbm.dK.store(j, dk)": "All queries have passed, so this gradient is finished.",
    "hbm.dV.store(j, dv)": "The values' gradient is finished too.",
}
BACKWARD_1: Reasons = BACKWARD | {
    "for i in tiles(len(hbm.Q), B_r):": "Queries inside: they pass by again with each tile of keys.",
    "q, do, l_i, m_i = hbm.Q.load(i), hbm.dO.load(i), hbm.l.load(i), hbm.m.load(i)": (
        "P was never stored: it is computed again from Q and K, with the final maximum and sum of each row."
    ),
    "p = torch.exp(s - m_i) / l_i": "With the final maximum and sum this is P itself.",
    "delta = (do * hbm.O.load(i)).sum(dim=1, keepdim=True)": (
        "The row's mean of dP under P equals dO · O, so no whole row of P is needed; O is loaded for every tile."
    ),
}
BACKWARD_2: Reasons = BACKWARD | {
    "for i in tiles(len(hbm.Q), B_r):": "Queries pass by once for D, and then again with each tile of keys.",
    "hbm.D.store(i, (hbm.dO.load(i) * hbm.O.load(i)).sum(dim=1, keepdim=True))": (
        "The row's mean of dP under P equals dO · O; computed once, it saves every tile the load of O."
    ),
    "q, do, lse_i, delta = hbm.Q.load(i), hbm.dO.load(i), hbm.lse.load(i), hbm.D.load(i)": (
        "P was never stored: it is computed again from Q, K and one log-sum-exp a row."
    ),
    "p = torch.exp(s - lse_i)": (
        "The log-sum-exp contains the maximum and the sum, so this is P itself, without a division."
    ),
}
OF_FUNCTIONS = {
    "flash_1_forward": EVERYWHERE | FORWARD_1,
    "flash_2_forward": EVERYWHERE | FORWARD_2,
    "flash_1_backward": EVERYWHERE | BACKWARD_1,
    "flash_2_backward": EVERYWHERE | BACKWARD_2,
}


def reasons(function: str, source: list[str]) -> list[str]:
    """Why each line of a function's source is there; empty for its signature and its docstring."""
    return [OF_FUNCTIONS[function].get(line.strip(), "") for line in source]
