-- Hands out slices of the held-out tasks. ARGV: version, how many slices, deadline in s.
-- Slices whose server did not deliver in time are handed out again. Returns {slices left}, then id, first task, tasks, ...
local todo, issued = key('eval_todo:' .. ARGV[1]), key('eval_issued:' .. ARGV[1])
local time = now()
for _, slice in ipairs(redis.call('ZRANGEBYSCORE', issued, '-inf', time)) do
  redis.call('ZREM', issued, slice)
  redis.call('RPUSH', todo, slice)
end
local granted = {0}
for _ = 1, tonumber(ARGV[2]) do
  local slice = redis.call('LPOP', todo)
  if not slice then break end
  redis.call('ZADD', issued, time + tonumber(ARGV[3]), slice)
  local first, tasks = slice:match('(%d+):(%d+)')
  granted[#granted + 1] = 'e' .. ARGV[1] .. '-' .. first
  granted[#granted + 1] = tonumber(first)
  granted[#granted + 1] = tonumber(tasks)
end
if #granted > 1 then redis.call('HSETNX', key('eval:' .. ARGV[1]), 'started', time) end
granted[1] = redis.call('LLEN', todo)
return granted
