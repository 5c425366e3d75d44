-- The account of generated tokens (counts.lua) at one moment. Those of groups that are ready, leased or in flight are summed
-- up here, the others were counted by the transitions.
-- Returns {rows, groups that differ}: of each row {name, counters as name, value, ..., ready, leased, in flight}; of each of
-- these groups its id and <row>:<difference>, ...
local names, rows, waiting = redis.call('HGETALL', key('account_rows')), {}, {}

local function sum(state, row, tokens)
  local sums = waiting[row] or {ready = 0, leased = 0, in_flight = 0}
  waiting[row] = sums
  sums[state] = sums[state] + tokens
end

for _, state in ipairs({'ready', 'leased'}) do
  for _, id in ipairs(redis.call('ZRANGE', key(state), 0, -1)) do
    local known = redis.call('HMGET', key('about:' .. id), 'row', 'tokens', 'uses')
    if known[1] and tonumber(known[3] or 0) == 0 then sum(state, known[1], tonumber(known[2])) end
  end
end
for _, server in ipairs(redis.call('ZRANGE', key('heard'), 0, -1)) do
  for _, entry in ipairs(redis.call('HVALS', key('unsettled:' .. server))) do
    local row, tokens, reason = read_unsettled(entry)
    if row and reason == '' then sum('in_flight', row, tokens) end
  end
end
for i = 1, #names, 2 do
  local row = names[i + 1]
  local sums = waiting[row] or {ready = 0, leased = 0, in_flight = 0}
  rows[#rows + 1] = {names[i], row, redis.call('HGETALL', key('account:' .. row)), sums.ready, sums.leased, sums.in_flight}
end
return {rows, redis.call('HGETALL', key('account_open'))}
