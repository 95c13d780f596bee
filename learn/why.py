"""Why each line of flash.py is there, in a sentence: the page shows that of the line that runs."""

from __future__ import annotations

Reasons = dict[str, str]  # of lines, without their indentation

EVERYWHERE: Reasons = {
    "scale = 1 / math.sqrt(Q.tensor.shape[1])": (
        "A score of d products grows with √d; divided by it, the softmax is as soft for any d."
    ),
    "if not see(i, j).any():": "A tile of which no query sees anything is not even loaded.",
    "continue": "The mask hides this tile whole, so it costs nothing.",
    "s = (scale * q @ k.T).masked_fill(~see(i, j), -torch.inf)": (
        "Scores exist for this tile alone; one that is not seen becomes −∞, whose exponential is 0."
    ),
}
FORWARD_1: Reasons = {
    "for j in tiles(len(K), B_c):": "Keys outside: a tile of K and V is loaded once in the whole pass.",
    "k, v = K.load(j), V.load(j)": "These keys and values stay while all queries pass by.",
    "for i in tiles(len(Q), B_r):": "Queries inside: they pass by again with each tile of keys.",
    "q, o_i, l_i, m_i = Q.load(i), O.load(i), l.load(i), m.load(i)": (
        "The unfinished rows come back from slow memory for each tile of keys: the price of this order of loops."
    ),
    "m_new = torch.maximum(m_i, s.amax(dim=1, keepdim=True))": (
        "The largest score so far is subtracted below, so that no exponential overflows."
    ),
    "p = torch.exp(s - m_new)": "Not divided by the sum yet, because later tiles still add to it.",
    "alpha = torch.exp(m_i - m_new)": "What was summed under the old maximum is brought under the new one.",
    "l_new = alpha * l_i + p.sum(dim=1, keepdim=True)": "The softmax's sum, as if it had known this maximum all along.",
    "o_new = (alpha * l_i * o_i + (p * keep(i, j)) @ v) / l_new.clamp(min=torch.finfo(l_new.dtype).tiny)": (
        "o was divided by the old sum, so it is multiplied by that and divided by the new one, for every tile."
    ),
    "O.store(i, o_new)": "The next queries need the fast memory, so these rows go out unfinished.",
    "l.store(i, l_new)": "The sum goes with them: the next tile of keys continues it.",
    "m.store(i, m_new)": "And the maximum under which this sum was made.",
}
FORWARD_2: Reasons = {
    "for i in tiles(len(Q), B_r):": "Queries outside: their rows stay in fast memory until they are finished.",
    "q = Q.load(i)": "Each query is loaded once in the whole pass.",
    "m = torch.full_like(q[:, :1], lowest(q.dtype))": (
        "No score was seen yet; a finite start keeps the exponential of a difference from being NaN."
    ),
    "l = torch.zeros_like(m)": "Nothing has been summed yet.",
    "o = torch.zeros_like(q)": "The output adds up here and leaves fast memory only when it is finished.",
    "for j in tiles(len(K), B_c):": "Keys inside: all of them pass by these queries, a tile at a time.",
    "k, v = K.load(j), V.load(j)": "One tile is all that has to fit, however many keys there are.",
    "m_new = torch.maximum(m, s.amax(dim=1, keepdim=True))": (
        "The largest score so far is subtracted below, so that no exponential overflows."
    ),
    "p = torch.exp(s - m_new)": "Not divided by the sum yet, because later tiles still add to it.",
    "alpha = torch.exp(m - m_new)": "What was summed under the old maximum is brought under the new one.",
    "l = alpha * l + p.sum(dim=1, keepdim=True)": (
        "The softmax's sum, as if it had known this maximum all along; dropout does not touch it."
    ),
    "o = alpha * o + (p * keep(i, j)) @ v": "No division: FlashAttention-2 divides once, when all keys have passed.",
    "m = m_new": "The next tile continues under this maximum.",
    "O.store(i, o / l)": "One division finishes the rows, and they are written once.",
    "lse.store(i, m + torch.log(l))": "From this one number a row the backward pass gets P, in place of m and l.",
}
BACKWARD: Reasons = {
    "for j in tiles(len(K), B_c):": "Keys outside: their gradients add up in fast memory and are written once.",
    "k, v = K.load(j), V.load(j)": "These keys and values stay while all queries pass by.",
    "dk, dv = torch.zeros_like(k), torch.zeros_like(v)": "What all queries pass back to these keys adds up here.",
    "dv = dv + (p * keep(i, j)).T @ do": "Each query passes back what it took of a value; nothing of what was dropped.",
    "dp = do @ v.T * keep(i, j)": "The gradient of the weights, under the dropout mask of the forward pass.",
    "ds = p * (dp - delta)": "Weights of a row sum to 1: a score gains only what it is above the row's mean, delta.",
    "dQ.store(i, dQ.load(i) + scale * ds @ k)": (
        "These queries come by again with the next keys, so their gradient adds up in slow memory."
    ),
    "dk = dk + scale * ds.T @ q": "These keys stay, so their gradient adds up in fast memory.",
    "dK.store(j, dk)": "All queries have passed, so this gradient is finished.",
    "dV.store(j, dv)": "And so is that of the values.",
}
BACKWARD_1: Reasons = BACKWARD | {
    "for i in tiles(len(Q), B_r):": "Queries inside: they pass by again with each tile of keys.",
    "q, do, l_i, m_i = Q.load(i), dO.load(i), l.load(i), m.load(i)": (
        "P was never stored: it is computed again from Q and K, with the final maximum and sum of each row."
    ),
    "p = torch.exp(s - m_i) / l_i": "The final maximum and sum are known now, so this is P itself, at once.",
    "delta = (do * O.load(i)).sum(dim=1, keepdim=True)": (
        "The row's mean of dP under P equals dO · O, so no whole row of P is needed; O is loaded for every tile."
    ),
}
BACKWARD_2: Reasons = BACKWARD | {
    "for i in tiles(len(Q), B_r):": "Queries pass by once for D, and then again with each tile of keys.",
    "D.store(i, (dO.load(i) * O.load(i)).sum(dim=1, keepdim=True))": (
        "The row's mean of dP under P equals dO · O; computed once, it saves every tile the load of O."
    ),
    "q, do, lse_i, delta = Q.load(i), dO.load(i), lse.load(i), D.load(i)": (
        "P was never stored: one log-sum-exp a row gives it again, in place of a maximum and a sum."
    ),
    "p = torch.exp(s - lse_i)": "The log-sum-exp holds maximum and sum, so this is P itself, without a division.",
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
