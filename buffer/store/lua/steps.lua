-- Number of groups that each training step used, for the steps that the ledger remembers.
-- Returns {last step of which groups were forgotten (-1: none), step, groups, ...}
local groups = {}
for _, state in ipairs({'used', 'trained', 'durable'}) do
  for _, id in ipairs(redis.call('ZRANGE', key(state), 0, -1)) do
    for _, step in ipairs(redis.call('LRANGE', key('steps:' .. id), 0, -1)) do
      groups[step] = (groups[step] or 0) + 1
    end
  end
end
local tally = {tonumber(redis.call('HGET', key('meta'), 'forgotten_step') or -1)}
for step, used in pairs(groups) do
  tally[#tally + 1] = tonumber(step)
  tally[#tally + 1] = used
end
return tally
