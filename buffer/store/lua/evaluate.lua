-- Grants slices of the held-out tasks to a server that runs the version under evaluation. A server holds at most an
-- even share of all slices among the live servers; when it has delivered some it may get more.
-- args: version, tasks (held-out), slice_size (in tasks), deadline_s, server.
-- Returns {slices left}, then id, first task, number of tasks, ...
local tasks, size, server, time = args.tasks, args.slice_size, args.server, now()
local of_version, mine = slices_of(server)
if tonumber(of_version) ~= args.version then return {0} end
local version = of_version
if redis.call('HSETNX', key('eval:' .. version), 'tasks', tasks) == 1 then  -- first request
  for first = 0, tasks - 1, size do
    redis.call('RPUSH', key('eval_todo:' .. version), first .. ':' .. math.min(size, tasks - first))
  end
  if tasks == 0 then
    redis.call('HSET', key('eval:' .. version), 'started', time)
    count_eval_tasks(version, 0, {})
  end
end
local part = math.ceil(math.ceil(tasks / size) / math.max(1, redis.call('ZCARD', key('heard'))))
local granted = {0}
for _ = #mine + 1, part do
  local slice = redis.call('LPOP', key('eval_todo:' .. version))
  if not slice then break end
  redis.call('ZADD', key('eval_issued:' .. version), time + args.deadline_s, slice)
  redis.call('HSET', key('eval_holder:' .. version), slice, server)
  redis.call('HSET', key('eval_since:' .. version), slice, timestamp())
  redis.call('HINCRBY', key('eval_handed:' .. version), slice, 1)
  local first, number = slice:match('(%d+):(%d+)')
  granted[#granted + 1] = slice_ticket(version, slice)
  granted[#granted + 1] = tonumber(first)
  granted[#granted + 1] = tonumber(number)
end
if #granted > 1 then redis.call('HSETNX', key('eval:' .. version), 'started', time) end
granted[1] = redis.call('LLEN', key('eval_todo:' .. version))
return granted
