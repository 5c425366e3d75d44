-- Hands out slices of the held-out tasks. ARGV: version, how many slices, deadline in s, server.
-- Returns {slices left}, then id, first task, tasks, ...
local version, time = ARGV[1], now()
local granted = {0}
for _ = 1, tonumber(ARGV[2]) do
  local slice = redis.call('LPOP', key('eval_todo:' .. version))
  if not slice then break end
  redis.call('ZADD', key('eval_issued:' .. version), time + tonumber(ARGV[3]), slice)
  redis.call('HSET', key('eval_holder:' .. version), slice, ARGV[4])
  redis.call('HSET', key('eval_since:' .. version), slice, string.format('%.6f', time))
  redis.call('HINCRBY', key('eval_handed:' .. version), slice, 1)
  local first, tasks = slice:match('(%d+):(%d+)')
  granted[#granted + 1] = slice_ticket(version, slice)
  granted[#granted + 1] = tonumber(first)
  granted[#granted + 1] = tonumber(tasks)
end
if #granted > 1 then redis.call('HSETNX', key('eval:' .. version), 'started', time) end
granted[1] = redis.call('LLEN', key('eval_todo:' .. version))
return granted
