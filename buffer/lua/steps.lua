-- How many groups each training step used, as far as the ledger remembers.
-- Returns {last step of which groups were forgotten (-1: none), step, groups, ...}
local found, groups = {}, {}
for _, state in ipairs({'used', 'trained', 'durable'}) do
  for _, id in ipairs(redis.call('ZRANGE', key(state), 0, -1)) do
    for _, step in ipairs(redis.call('LRANGE', key('steps:' .. id), 0, -1)) do
      if not groups[step] then found[#found + 1] = step end
      groups[step] = (groups[step] or 0) + 1
    end
  end
end
local tally = {tonumber(redis.call('HGET', key('meta'), 'forgotten_step') or -1)}
for _, step in ipairs(found) do
  tally[#tally + 1] = tonumber(step)
  tally[#tally + 1] = groups[step]
end
return tally
